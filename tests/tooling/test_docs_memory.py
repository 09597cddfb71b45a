"""docs/memory.md: its code runs, and its table is what memory_report measures on the GPT."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from test_readme import run_blocks

import mixprec

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "memory.md"
KINDS = ("linear", "attention", "activation", "norm", "loss", "other")


def rows() -> list[str]:
    """The table in MB. `python tests/tooling/test_docs_memory.py` prints it."""
    from gpt_model import GPT, GPTConfig

    tokens = torch.zeros(8, 256, dtype=torch.long)
    lines = [f"| | {' | '.join(KINDS)} | all |", "|---" * (len(KINDS) + 2) + "|"]
    for recipe in ("fp32", "bf16", "fp8"):
        for saved in (None, "int8", "int4"):
            model = GPT(GPTConfig(layers=4, width=512, heads=8, context=256))
            if recipe != "fp32":
                mixprec.cast_parameters(mixprec.convert(model, recipe), torch.bfloat16)
            with mixprec.compress_saved(saved or {"": None}, model=model, seed=0):
                optimizer = torch.optim.SGD(model.parameters())
                found = mixprec.memory_report(model, optimizer, (tokens, tokens))
            sizes = [*(found.saved.get(kind, 0) for kind in KINDS), found.saved_total]
            cells = " | ".join(f"{size / 1e6:.1f}" for size in sizes)
            lines.append(f"| {recipe}{f', {saved}' if saved else ''} | {cells} |")
    return lines


def test_the_table_is_what_the_gpt_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    inside = re.search(r"<!-- saved -->\n(.*?)\n<!-- end -->", DOC.read_text(), re.S)
    assert inside is not None
    table = rows()
    assert inside[1].splitlines() == table
    total = {line.split(" | ")[0]: float(line.split(" | ")[-1].rstrip(" |")) for line in table[2:]}
    assert total["| bf16, int8"] <= 0.44 * total["| bf16"]
    assert total["| bf16, int4"] <= 0.31 * total["| bf16"]


def test_the_code_runs(tmp_path: Path) -> None:
    output = run_blocks(DOC, tmp_path, "\nassert after.saved_total < 0.5 * before.saved_total\n")
    assert re.search(r"plain +int8\n-+\nparameters +2\.1\d MB", output)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    print("\n".join(rows()))
