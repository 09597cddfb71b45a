"""The tables of README.md, generated from measured results: between two markers, never typed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results, table


def markdown(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(where: dict[str, Any]) -> str:
    words = [where["processor"], f"{where['threads']} threads", f"torch {where['torch']}"]
    if where.get("commit"):
        words.append(f"commit {where['commit']}")
    return ", ".join(words) + "."


def bench_block(path: Path) -> str:
    """The table of a bench run, where it ran, and what became of the targets."""
    data = results.load(path)
    rows = data["rows"]
    shown = markdown(table.HEADER, [table.cells(row) for row in rows])
    remarks = "".join(f"- {line}\n" for line in table.remarks(rows))
    return f"{shown}\n\n{remarks}\n{table.summary(rows)}. {machine(data['environment'])}"


def demo_block(path: Path) -> str:
    """The demo's own table, cell by cell, and the machine it ran on."""
    data = json.loads(path.read_text())
    header, *rows = data["table"]
    shown = markdown(tuple(header), [tuple(row) for row in rows])
    unigram = data["environment"]["unigram_bits_per_byte"]
    return (
        f"{shown}\n\nCounting bytes alone (the unigram entropy) takes {unigram:.2f} bits per byte. "
        f"{machine(data['environment'])}"
    )


def fill(text: str, name: str, block: str) -> str:
    """`text` with what stands between <!-- name --> and <!-- end --> replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"readme: README must hold the markers <!-- {name} --> and <!-- end -->")
    return pattern.sub(lambda match: f"{match[1]}\n{block}\n\n{match[2]}", text, count=1)


def render(readme: Path, folder: Path) -> str:
    """README with both tables as `folder` (demo.json, bench.json) has them."""
    text = fill(readme.read_text(), "demo", demo_block(folder / "demo.json"))
    return fill(text, "bench", bench_block(folder / "bench.json"))


def write(readme: Path, folder: Path) -> bool:
    """Bring the tables of README up to date; whether that changed it."""
    text = render(readme, folder)
    if text == readme.read_text():
        return False
    readme.write_text(text)
    return True
