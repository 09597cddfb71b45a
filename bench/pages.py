"""Generated blocks of README.md and docs/: between two markers, never typed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def machine(where: dict[str, Any]) -> str:
    """Where the figures of a block were taken."""
    isa = f" ({where['isa']})" if where.get("isa") else ""
    parts = [where["processor"] + isa, f"{where['threads']} threads", f"torch {where['torch']}"]
    if where.get("commit"):
        parts.append(f"commit {where['commit']}")
    return ", ".join(parts) + "."


def fill(text: str, name: str, block: str) -> str:
    """`text` with what stands between <!-- name --> and <!-- end --> replaced."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"report: the page must hold the markers <!-- {name} --> and <!-- end -->")
    return pattern.sub(lambda match: f"{match[1]}\n{block}\n\n{match[2]}", text, count=1)


def update(page: Path, name: str, block: str) -> None:
    """Bring one block of a page up to date."""
    page.write_text(fill(page.read_text(), name, block))


def markers(text: str) -> list[str]:
    """The names of the blocks of a page, in order."""
    return [name for name in re.findall(r"<!-- ([^>]+?) -->", text) if name != "end"]
