"""Programs that measure what pages show, and what the pages say of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec.bench import results
from mixprec.diagnostics import plotting

ROOT = Path(__file__).resolve().parents[2]


def relative_error(x: torch.Tensor, y: torch.Tensor, fast_accum: bool) -> float:
    """Of sums as Hopper computes them, of values of E4M3."""
    a, b = (mixprec.quantize(t, "e4m3").data for t in (x, y))
    with mixprec.simulate("hopper"):
        c = mixprec.gemm(a, b, out_dtype=torch.float32, fast_accum=fast_accum)
    exact = a.double() @ b.double()
    return float((c - exact).norm() / exact.norm())


def test_promotion_is_what_keeps_long_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    for make, without in ((torch.randn, 1e-3), (torch.rand, 6e-2)):
        x, y = (make(s, generator=generator) for s in ((32, 4096), (4096, 32)))
        assert without < relative_error(x, y, True) < 0.07
        assert relative_error(x, y, False) < min(1e-3, without / 7)


# The statistics of the GPT


def test_picture_and_tables_of_statistics_are_of_one_run(
    examples: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpt_stats

    content = json.loads((ROOT / results.CPU / "stats.json").read_text())
    drawn = hashlib.sha256((ROOT / "docs" / "stats.png").read_bytes()).hexdigest()
    assert content["sha256"] == drawn, "run python examples/gpt_stats.py"

    figures: list[Any] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    for name, small in (("CONTEXT", 32), ("EVERY", 1), ("LINES", None)):
        monkeypatch.setattr(gpt_stats, name, small)
    page, picture = tmp_path / "docs" / "stats.md", tmp_path / "docs" / "stats.png"
    page.parent.mkdir()
    page.write_text("<!-- stats monitor -->\n<!-- end -->\n<!-- stats layers -->\n<!-- end -->\n")
    for file in (tmp_path / "README.md", picture):
        file.touch()
    assert gpt_stats.main(["--root", str(tmp_path), "--steps", "2", "--sqnr-steps", "2"]) == 0
    *layers, others = [entry.get_text() for entry in figures[0].legends[0].get_texts()]
    table = page.read_text()
    assert others == "the 10 other layers"
    assert {*layers} <= {line.split(" ")[0] for line in table.splitlines()}
    assert table.count("torch 2") == 2, "where it was measured"
