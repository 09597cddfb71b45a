"""docs/coming_from.md: the right column of every table runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import mixprec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell))


def is_program(text: str) -> bool:
    """A statement, not a name or a value."""
    try:
        (first, *_) = ast.parse(text).body
    except SyntaxError:
        return False
    return not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Name | ast.Constant)


@pytest.mark.parametrize(("library", "text"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_right_columns_run(
    library: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    ran = 0
    names: dict[str, object] = {"torch": torch, "mixprec": mixprec, "x": torch.randn(8, 32, 64)}
    for row in rows:
        assert len(row) == 2, row
        if any("convert(" in code for code in spans(row[1])) or "model" not in names:
            body, norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
            layers = {"norm": norm, "body": body, "act": torch.nn.GELU()}
            layers["head"] = torch.nn.Linear(64, 16)
            names["model"] = model = torch.nn.Sequential()
            for name, layer in layers.items():
                model.add_module(name, layer)
        programs = [code for code in spans(row[1]) if is_program(code)]
        for code in programs:
            exec(code, names)
        ran += len(programs)
        assert programs or row[1].strip() == "-" or "](" in row[1], row
    assert ran >= max(4, len(rows) - 1)
