"""The commands of mixprec.bench that measure what pages show, and what the pages say of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mixprec.bench import __main__ as command
from mixprec.bench import accumulator, accuracy, footprint, plot, profile, results, underflow
from mixprec.diagnostics import plotting

ROOT = Path(__file__).resolve().parents[2]


def test_promotion_is_what_keeps_long_sums() -> None:
    for data, without in (("randn", 1e-3), ("uniform [0, 1]", 3e-2)):
        assert accumulator.relative_error(data, 4096, True) > without
        assert accumulator.relative_error(data, 4096, False) < without / 7


def test_the_page_shows_what_the_model_of_the_accumulator_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = (ROOT / "docs" / "numerics.md").read_text().splitlines()
    start = lines.index("<!-- accumulator -->") + 4
    assert len(accumulator.SIZES) == lines[start:].index("")
    monkeypatch.setattr(accumulator, "SIZES", accumulator.SIZES[:2])
    errors = accumulator.measure(accumulator.SIZES)
    assert accumulator.table(errors).splitlines()[2:] == lines[start : start + 2]


# The demonstration of loss scaling


def committed() -> dict[str, dict[str, Any]]:
    content = json.loads((ROOT / underflow.RESULT).read_text())
    return {run["name"]: run for run in content["runs"]}


def test_what_the_page_says_of_loss_scaling() -> None:
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
@pytest.mark.parametrize("run", underflow.RUNS, ids=lambda run: run.name)
def test_a_few_steps_give_the_committed_start(run: underflow.Run) -> None:
    """Other processors add up in another order: the figures agree, the last bits need not."""
    got, want = underflow.train(run, steps=2), committed()[run.name]
    assert got["losses"][0] == pytest.approx(want["losses"][0], rel=1e-2)
    assert got["flushed"][0] == pytest.approx(want["flushed"][0], abs=0.02)


def test_formats_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe has a row of its own in both panels, with the difference of the page's table."""
    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    content = accuracy.load(ROOT / results.CPU, "gpt-formats")
    plot.formats(content, Path())
    left, right = figures[0].axes
    lines = [line for line in content["summary"] if line["recipe"] != "fp32"]
    assert [tick.get_text() for tick in left.get_yticklabels()] == [x["recipe"] for x in lines]
    assert left.get_ylim() == right.get_ylim()
    for row, line in enumerate(lines):
        mean, half = line["difference"], line["difference_interval"]
        ends = left.containers[row][2][0].get_segments()[0]
        assert ends.tolist() == [[mean - half, row], [mean + half, row]]


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


# The commands


def written(name: str, root: Path) -> dict[str, Any]:
    """The result that a command writes under `root`."""
    assert command.main([name, "--root", str(root)]) == 0
    content: dict[str, Any] = json.loads((root / results.CPU / f"{name}.json").read_text())
    return content


def test_footprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 keeps half of what bf16 keeps, and nobody saves parameter memory."""
    monkeypatch.setattr(footprint, "WIDTH", 64)
    monkeypatch.setattr(footprint, "TOKENS", 2048)
    sizes = written("footprint", tmp_path)["training"]
    assert sizes["bf16"]["saved"] == sizes["fp32"]["saved"] / 2
    for recipe in ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block"):
        assert sizes[recipe]["saved"] <= 0.55 * sizes["bf16"]["saved"]
    held = {r: s["parameters"] + s["gradients"] + s["optimizer"] for r, s in sizes.items()}
    assert held["bf16"] == pytest.approx(held["fp32"], rel=0.01)


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixprec.bench.cases.gpt.SIZES", {"1x64": (1, 64, 32)})
    monkeypatch.setattr(profile, "STEPS", 2)
    times = written("profile", tmp_path)["sizes"]["1x64"]
    assert all(time > 0 for time in times.values()), times


@pytest.mark.parametrize(
    ("name", "page"), [("accumulator", "numerics"), ("underflow", "loss_scaling"), ("formats", "")]
)
def test_a_command_writes_picture_and_table(
    name: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(accumulator, "SIZES", (128, 256))
    made_up = {data: {way: [1e-3, 2e-3] for way in accumulator.WAYS} for data in accumulator.DATA}
    monkeypatch.setattr(accumulator, "measure", lambda: made_up)
    measure = underflow.measure
    monkeypatch.setattr(underflow, "measure", lambda: measure(steps=3))
    runs = Path("bench", "results", "cpu", "accuracy-gpt-formats.json")
    (tmp_path / runs).parent.mkdir(parents=True)
    shutil.copy(ROOT / runs, tmp_path / runs)
    (tmp_path / "docs").mkdir()
    text = f"before\n<!-- {name} -->\n<!-- end -->\nafter\n"
    (tmp_path / "docs" / f"{page}.md").write_text(text)
    assert command.main([name, "--root", str(tmp_path)]) == 0
    assert (tmp_path / "docs" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.removesuffix("\n")
    if page:
        found = (tmp_path / "docs" / f"{page}.md").read_text()
        assert found == text.replace("-->\n<", f"-->\n\n{printed}\n\n<")
        assert printed.startswith("| ")
