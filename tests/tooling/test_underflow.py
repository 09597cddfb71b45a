"""The demonstration of loss scaling: that it shows what docs/loss_scaling.md says it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mixprec.bench import __main__ as command
from mixprec.bench import underflow

ROOT = Path(__file__).resolve().parents[2]


def committed() -> dict[str, dict[str, Any]]:
    content = json.loads((ROOT / underflow.RESULT).read_text())
    return {run["name"]: run for run in content["runs"]}


def test_the_page_shows_the_committed_result() -> None:
    page, content = ROOT / underflow.PAGE, json.loads((ROOT / underflow.RESULT).read_text())
    assert underflow.block(content) in page.read_text(), f"run {underflow.COMMAND}"
    assert (ROOT / underflow.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_what_the_page_says_of_it() -> None:
    runs = committed()
    assert list(runs) == [run.name for run in underflow.RUNS]
    loss = {name: underflow.last(run["losses"]) for name, run in runs.items()}
    assert loss["fp16"] > 2 * loss["fp32"]
    for name in ("bf16", "fp16, GradScaler"):
        assert loss[name] == pytest.approx(loss["fp32"], rel=0.02)
        assert max(runs[name]["flushed"]) < 0.01
        assert runs[name]["skipped"] == 0
    fp16 = runs["fp16"]["flushed"]
    assert fp16[0] < 0.8 < 0.99 < fp16[-1], "it starts, and stalls"
    # From step 40 on it gets nowhere, while the others go on.
    assert min(runs["fp16"]["losses"][40:]) > 0.9 * runs["fp16"]["losses"][40]
    assert loss["fp32"] < 0.8 * runs["fp32"]["losses"][40]
    assert runs["fp16, GradScaler"]["scale"] == 65536


@pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")
@pytest.mark.parametrize("index", range(len(underflow.RUNS)))
def test_a_few_steps_give_the_committed_start(index: int) -> None:
    """Other processors add up in another order: the figures agree, the last bits need not."""
    run = underflow.RUNS[index]
    got, want = underflow.train(run, steps=2), committed()[run.name]
    assert got["losses"][0] == pytest.approx(want["losses"][0], rel=1e-2)
    assert got["flushed"][0] == pytest.approx(want["flushed"][0], abs=0.02)


def test_the_command_writes_result_picture_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page = tmp_path / underflow.PAGE
    page.write_text("before\n<!-- underflow -->\n<!-- end -->\nafter\n")
    measure = underflow.measure
    monkeypatch.setattr(underflow, "measure", lambda: measure(steps=3))
    assert command.main(["underflow", "--root", str(tmp_path)]) == 0
    assert (tmp_path / underflow.PICTURE).read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / underflow.RESULT).read_text())
    assert underflow.block(content) in page.read_text()
