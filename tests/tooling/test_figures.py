"""Programs that measure what pages show, and what the pages say of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec.bench import results
from mixprec.bench.studies import accuracy

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


def test_the_table_of_statistics(
    examples: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpt_stats

    for name, small in (("CONTEXT", 32), ("EVERY", 1), ("LINES", None)):
        monkeypatch.setattr(gpt_stats, name, small)
    page = tmp_path / "docs" / "stats.md"
    page.parent.mkdir()
    page.write_text("<!-- stats monitor -->\n<!-- end -->\n")
    (tmp_path / "README.md").touch()
    assert gpt_stats.main(["--root", str(tmp_path), "--steps", "2"]) == 0
    assert "blocks.0.attention.qkv.1  g e5m2" in page.read_text()
    assert page.read_text().count("torch 2") == 1, "where it was measured"


# What is said of accuracy: the statistics, the verdicts, and what the runs leave


pytest.importorskip("scipy", reason="the intervals need scipy")


def content(runs: list[dict[str, object]], *, image: bool = False) -> dict[str, object]:
    about = accuracy.IMAGE if image else accuracy.GPT
    return {
        "task": "cnn" if image else "gpt",
        **about,
        "environment": {"processor": "P", "threads": 2, "torch": "T", "commit": None},
        "summary": accuracy.summary(runs, about["unit"]),
        "runs": [{"samples": 10, "seconds": 1.0, "skipped": 0, **run} for run in runs],
    }


def of(recipe: str, *values: float) -> list[dict[str, object]]:
    return [{"recipe": recipe, "seed": seed, "value": value} for seed, value in enumerate(values)]


def test_interval_is_students() -> None:
    """For three values t = 4.3027 (any table of the distribution), s = 1, so 4.3027 / sqrt(3)."""
    assert accuracy.interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert accuracy.interval([1.0]) is None


def test_differences_are_between_partners() -> None:
    """Seeds differ by far more than recipes do: only their pairs show the recipe."""
    runs = of("fp32", 1.0, 2.0, 4.0) + of("fp8", 1.01, 2.02, 4.04)
    line = accuracy.summary(runs, "%")[1]
    assert line["difference"] == pytest.approx(1.0)
    assert line["difference_interval"] == pytest.approx(0.0, abs=1e-9)
    assert line["interval"] > 1


@pytest.mark.parametrize(
    ("image", "fp8", "verdict", "met"),
    [
        (False, (2.001, 2.0, 1.999), "not significant", True),
        (False, (2.02, 2.0201, 2.0199), "worse", False),
        (False, (1.98, 1.9801, 1.9799), "better", True),
        (True, (1.5, 1.5001, 1.4999), "worse", True),
        (True, (1.3, 1.3001, 1.2999), "worse", False),
    ],
)
def test_verdicts(image: bool, fp8: tuple[float, ...], verdict: str, met: bool) -> None:
    given = content(of("fp32", 2.0, 2.0, 2.0) + of("fp8", *fp8), image=image)
    line = given["summary"][1]
    assert accuracy.verdict(given, line) == verdict
    assert accuracy.allowed(given, line)[1] is met
    assert f"({verdict})" in accuracy.sentence(given, ["fp32", "fp8"])
    block = accuracy.block(given)
    assert verdict in block
    assert "3 seeds, 10 held-out" in block


def test_the_program_runs(
    few_glyphs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps a run: the file has a run per recipe, and the page can be made of it."""
    arguments = ["--task", "vit", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    assert accuracy.main(arguments) == 0
    measured = results.read_json(tmp_path / "accuracy-vit.json")
    assert [run["recipe"] for run in measured["runs"]] == list(accuracy.SETS["precisions"])
    assert all(0 <= run["value"] <= 100 for run in measured["runs"])
    assert "one seed: no verdict" in accuracy.block(measured)
    assert "vit seed 0 fp8-block" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        accuracy.main(["--task", "dog"])
