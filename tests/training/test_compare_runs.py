"""compare(): what the caller gives is used, trouble in one run ends no other, reports are files."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import random
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from compare_task import MLP, RECIPES, SAMPLES, STEPS, K, data
from torch import nn

import mixprec
from mixprec.diagnostics import plotting, writers
from mixprec.diagnostics.report import Report, Row


def test_one_model_at_a_time_is_in_memory() -> None:
    made: list[weakref.ref[nn.Module]] = []

    def make() -> nn.Module:
        assert all(model() is None for model in made), "the model of the last recipe is still there"
        model = MLP()
        model.itself = [model]  # as hooks that hold their model do
        made.append(weakref.ref(model))
        return model

    gc.disable()
    try:
        mixprec.compare(make, data(2), RECIPES)
    finally:
        gc.enable()
    assert len(made) == len(RECIPES)


def test_schedule_optimizer_count_steps_and_progress_are_used() -> None:
    """Validation is in evaluation mode; the caller's mode is not the training's."""
    rates: list[float] = []
    modes: list[tuple[bool, bool]] = []
    calls: list[tuple] = []

    class WatchedSGD(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step()

    class WatchedMLP(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x, y)

    with torch.no_grad():
        report = mixprec.compare(
            WatchedMLP,
            data(9),
            "fp8",
            steps=3,
            make_optimizer=lambda model: WatchedSGD(model.parameters(), lr=0.5),
            schedule=lambda step: 1 / (step + 1),
            count=lambda batch: batch[0].numel(),
            progress=lambda *call: calls.append(call),
            validation=data(1),
        )
        assert not torch.is_grad_enabled()
    (row,) = report.rows
    assert rates == [0.5, 0.25, 0.5 / 3]
    assert modes == [(True, True)] * 3 + [(False, False)]
    assert calls == [("fp8", i + 1, 3, loss) for i, loss in enumerate(row.losses)]
    assert row.units == [SAMPLES * K] * 3
    assert (row.steps, row.skipped_steps) == (3, 0)
    assert row.optimizer_bytes == 0, "SGD without momentum keeps nothing"


def test_a_shuffling_loader_gives_every_recipe_the_same_order() -> None:
    samples = torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*data(4), strict=True)))
    loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()[1:3]
    one = mixprec.compare(MLP, loader, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    np.testing.assert_equal(np.random.get_state()[1:3], numpy_state)
    orders = [row.data for row in one.rows]
    assert orders == [orders[0]] * 4

    class DrawsMore(MLP):
        def __init__(self) -> None:
            super().__init__()
            torch.rand(5)
            np.random.rand(5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * np.random.rand()

    assert (first := mixprec.compare(DrawsMore, loader, "bf16", seed=3)["bf16"]).data == orders[0]
    torch.manual_seed(99)  # what was drawn before does not matter, the seed does
    np.random.seed(99)
    assert mixprec.compare(DrawsMore, loader, "bf16", seed=3)["bf16"].losses == first.losses
    assert mixprec.compare(MLP, loader, ("bf16",), seed=4)["bf16"].data != orders[0]


def test_data_that_differs_between_recipes_is_refused() -> None:
    seeds = iter(range(100))
    with pytest.raises(ValueError, match=r"same for every recipe, but step 1 of bf16 got other"):
        mixprec.compare(MLP, lambda: iter(data(2, seed=next(seeds))))


def test_losses_that_are_not_finite_end_the_run_but_not_the_comparison(tmp_path: Path) -> None:
    class Breaks(MLP):
        calls = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            bad = self.first.weight.dtype == torch.bfloat16 and self.calls > 2
            return super().forward(x, y) * (math.inf if bad else 1.0)

    report = mixprec.compare(Breaks, data(STEPS), ("bf16", "fp32"), validation=data(1))
    bf16, fp32 = report.rows
    assert bf16.status == "diverged: 10 losses in a row not finite, step 12"
    assert (bf16.steps, bf16.validation_loss, report.difference(bf16)) == (12, None, None)
    assert (fp32.status, fp32.steps) == ("complete", STEPS)
    assert "diverged" in str(report)
    report.save(tmp_path / "r.json")
    losses = json.loads((tmp_path / "r.json").read_text())["rows"][0]["train_losses"]
    assert losses == [*bf16.losses[:2], *[None] * 10]
    report.plot(tmp_path / "r.png")


def test_interrupt_returns_what_there_is(tmp_path: Path) -> None:
    def stop(recipe: str, step: int, steps: int | None, loss: float) -> None:
        if (recipe, step) == ("fp16", 3):
            raise KeyboardInterrupt

    state = torch.get_rng_state()
    report = mixprec.compare(MLP, data(5), validation=data(1), progress=stop)
    assert report.interrupted
    assert torch.equal(torch.get_rng_state(), state)
    statuses = ["complete", "complete", "interrupted in step 3", "not started"]
    assert [row.status for row in report.rows] == statuses
    assert report["fp16"].loss_scale == 65536.0
    assert report["fp16"].parameter_bytes is not None
    assert [row.validation_loss is None for row in report.rows] == [False, False, True, True]
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["interrupted"] is True
    report.plot(tmp_path / "r.png")
    fp16, fp8 = str(report).splitlines()[6:]
    wanted = "fp16: interrupted in step 3, 3 of 5 steps, 0 of 3 steps skipped, loss scale 2^16"
    assert fp16 == f"{wanted} at the end"
    assert fp8 == "fp8: not started, 0 of 5 steps"
    seen: list[object] = []
    with mixprec.functional.observed(lambda *call: seen.append(call)):
        mixprec.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
    assert len(seen) == 1, "the interrupted run's own observer is gone"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipes": ("fp32", "fp9")}, ValueError, "recipe must be"),
        ({"recipes": ("fp8", "fp8")}, ValueError, "different names"),
        ({"batches": iter(data(1))}, TypeError, "batches must be readable once per recipe"),
        ({"make_model": MLP()}, TypeError, r"be a function .*lambda: MyModel\(\), .*\), got MLP$"),
        ({"make_model": cache(MLP)}, TypeError, r"a new torch.nn.Module at .* got the model of"),
        ({"make_model": lambda: None}, TypeError, "torch.nn.Module at each call, .* got NoneType"),
        ({"validation": iter(data(1))}, TypeError, "validation must be readable once per recipe"),
        (
            {"max_grad_norm": 1.0, "make_optimizer": lambda model: None},
            ValueError,
            "max_grad_norm must be given to your own optimizer",
        ),
        ({"batches": []}, ValueError, "batches must hold at least one"),
        ({"validation": []}, ValueError, "validation must hold at least one"),
        (
            {"make_model": lambda: nn.Linear(64, 128), "batches": [torch.ones(2, 64)]},
            ValueError,
            r"the loss must be one number, got shape \(2, 128\): forward must return it, ",
        ),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mixprec.compare(**({"make_model": MLP, "batches": data(1)} | arguments))


def test_table_json_and_plot(report: mixprec.Report, tmp_path: Path) -> None:
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["recipe", "loss", "vs", "fp32"]
    assert [line.split()[0] for line in lines[2:6]] == list(RECIPES)
    assert f"{report['fp32'].validation_loss:.4f}" in lines[2]

    report.save(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == report.to_dict()
    assert read["rows"][3]["gemms"]["forward"] == {"e4m3 x e4m3": 3 * STEPS}
    assert read["rows"][3]["train_losses"] == report["fp8"].losses
    assert read["environment"]["torch"] == str(torch.__version__)

    for name, start in (("r.png", b"\x89PNG\r\n\x1a\n"), ("r.svg", b"<?xml")):
        report.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert sorted(os.listdir(tmp_path)) == ["r.json", "r.png", "r.svg"]


@pytest.mark.parametrize("kind", ["save", "plot"])
def test_full_disk_leaves_the_old_file_and_nothing_else(
    report: mixprec.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "r.png"
    path.write_text("the old one")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device: '.*r\.png'"):
        getattr(report, kind)(path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_text() == "the old one"


def test_plot_without_matplotlib(
    report: mixprec.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mixprec\[demo\]'"):
        report.plot(tmp_path / "r.png")
    assert list(tmp_path.iterdir()) == []


def made_up(**validation: float) -> Report:
    """Two recipes of 20 steps each; the losses of the last two are 1 and 3, or 2 and 4."""
    rows = [
        Row(name, "complete", validation.get(name), [9.0] * 18 + last, loss_scale=scale)
        for name, last, scale in (("fp32", [1.0, 3.0], None), ("fp16", [2.0, 4.0], 65536.0))
    ]
    return Report(rows=rows)


def test_without_validation_the_end_of_training_is_compared() -> None:
    found = made_up()
    header, fp32, fp16 = found.table()
    assert header[1] == "train loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["2.0000", "3.0000", "+50.00%"]
    assert found.difference(found["fp16"]) == pytest.approx(0.5)


def test_with_validation_no_training_loss_stands_in_for_a_missing_one() -> None:
    header, fp32, fp16 = made_up(fp32=1.5).table()
    assert header[1] == "loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["1.5000", "-", "-"]


def test_eighty_columns_and_a_note_for_what_is_not_the_rule() -> None:
    sizes = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes"), 29_900_000_000)
    done = {"losses": [0.1], "seconds": [1e-5], "units": [10], "saved_bytes": 31_620_000, **sizes}
    rows = [Row("fp32", "complete", **done), Row("fp8-delayed", "complete", 1.25, **done)]
    found = Report("samples", "bits/byte", rows=[*rows, Row("fp16", "KeyboardInterrupt")])
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == [
        "fp8-delayed", "1.2500", "-", "1,000,000", *["29.9", "GB"] * 3, "31.6", "MB",
    ]  # fmt: skip
    assert lines[5:] == ["fp16: KeyboardInterrupt, 0 of 1 steps"]


def test_the_picture_of_one_step_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    rows = [Row(name, "complete", losses=[loss]) for name, loss in (("fp32", 2.0), ("fp8", 2.1))]
    Report(rows=rows).plot("one.png")
    above, below = figures[0].axes
    drawn = [line for line in (*above.lines, *below.lines) if len(line.get_xdata()) == 1]
    assert {line.get_marker() for line in drawn} == {"o"}
    assert above.get_ylabel() == "training loss"
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["training loss"]
    assert all(tick == round(tick) for tick in below.get_xticks())


def test_a_difference_smaller_than_that_of_another_seed_is_none_that_was_seen() -> None:
    losses = {"fp32": 2.0, "bf16": 1.99, "fp8": 2.05, "again": 1.98}
    rows = [Row(name, "complete", loss, reseeded=name == "again") for name, loss in losses.items()]
    found = Report(rows=rows)
    assert found.chance() == pytest.approx(0.01)
    assert found.notes() == [
        "again: fp32 from another seed, which changes the loss by 1.00%",
        "bf16: within run-to-run noise",
        "fp8: a larger one, which a single run cannot tell from chance",
    ]
    assert Report(rows=rows[:3]).chance() is None


# What compare and plan show of how far they are


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Task(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def task() -> Task:
    return Task(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_line_on_a_terminal_alone(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", kind())
    data, calls = [torch.randn(4, 8) for _ in range(3)], []

    def said() -> list[str]:
        """Since the last time; no line stays."""
        found = writers.sys.stderr.getvalue()
        monkeypatch.setattr("sys.stderr", kind())
        assert found.count("\n") == found.count("mixprec: convert"), "those of convert alone"
        *lines, last = found.split("\r\x1b[K")
        assert not last
        return [line for line in lines if line and "convert" not in line]

    mixprec.plan(task(), data, budget={"time": 0.5}, formats=("fp8", "bf16"))
    found = said()
    mixprec.compare(task, data, ["fp32", "bf16"], loss_name="nats")
    found += said()
    if kind is io.StringIO:
        assert found == []
        return
    total = found[0].split()[3]
    assert found[0] == f"plan: 1 of {total} passes"
    assert f"plan: {total} of {total} passes" in found
    assert [line.partition(", nats ")[0] for line in found if line.startswith("compare")] == [
        f"compare: {recipe}, step {step} of 3" for recipe in ("fp32", "bf16") for step in (1, 2, 3)
    ]
    mixprec.compare(task, data, "fp32", progress=lambda *args: calls.append(args))
    assert said() == []
    assert len(calls) == 3
