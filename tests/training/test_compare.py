"""compare(): the same task per recipe, honest measurements, and reports that survive trouble."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import random
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixprec
from mixprec.diagnostics.report import KINDS, Row

RECIPES = ("fp32", "bf16", "fp16", "fp8")
K, HIDDEN, CLASSES, SAMPLES, STEPS = 16, 32, 4, 24, 20


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        return F.cross_entropy(self.head(F.relu(self.second(self.norm(x)))).float(), y)


def data(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A task that can be learned: the class is the largest of the first numbers."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, SAMPLES, K, generator=generator)
    return [(x, x[:, :CLASSES].argmax(1)) for x in xs]


@pytest.fixture(scope="module")
def report() -> mixprec.Report:
    return mixprec.compare(MLP, data(STEPS), lr=1e-2, max_grad_norm=1.0, validation=data(4, 2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns_and_stays_near_fp32(report: mixprec.Report, recipe: str) -> None:
    row = report[recipe]
    assert (row.status, row.steps, len(row.losses)) == ("complete", STEPS, STEPS)
    assert row.validation_loss < 0.8 * row.losses[0]
    assert abs(report.difference(row)) < 0.05
    assert row.speed > 0


def test_same_data_and_same_first_weights(report: mixprec.Report) -> None:
    assert len(set(report["fp32"].data)) == STEPS
    for recipe in RECIPES:
        assert report[recipe].data == report["fp32"].data
        # Before the first update the runs differ by the rounding of their formats alone.
        assert math.isclose(report[recipe].losses[0], report["fp32"].losses[0], rel_tol=0.03)


def test_fp32_row_is_plain_training(report: mixprec.Report) -> None:
    torch.manual_seed(0)
    model = MLP()
    params = list(model.parameters())
    optimizer = mixprec.optim.AdamW(params, 1e-2, weight_decay=1e-2, max_grad_norm=1.0)
    losses = []
    for x, y in data(STEPS):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == report["fp32"].losses
    model.eval()
    with torch.no_grad():
        validation = [model(x, y).item() for x, y in data(4, 2)]
    assert report["fp32"].validation_loss == math.fsum(validation) / 4


def test_bytes_of_parameters_gradients_and_state(report: mixprec.Report) -> None:
    norm = 2 * HIDDEN
    n = sum(p.numel() for p in MLP().parameters()) - norm
    tensors = len(list(MLP().parameters()))
    for recipe, width, masters in (("fp32", 4, 0), ("bf16", 2, 4), ("fp16", 2, 4), ("fp8", 2, 4)):
        row = report[recipe]
        assert row.parameter_bytes == row.gradient_bytes == width * n + 4 * norm
        moments = row.optimizer_bytes - (8 + masters) * n - 8 * norm
        assert 0 <= moments <= 8 * tensors, "besides the moments and masters only a step count each"


class OneLinear(nn.Module):
    """Keeps for backward: the linear's input and weight, and the FP32 result that is squared."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()  # so that the weight is kept too, for grad_input
        return self.linear(x).float().square().mean()


def test_the_parts_of_a_step(report: mixprec.Report) -> None:
    """They fill the step but for reading the loss; only fp16 has a scaler."""
    for row in report.rows:
        names = ["forward", "backward", "optimizer", *(["scaler"] if row.recipe == "fp16" else [])]
        assert list(row.parts) == names
        assert all(len(seconds) == STEPS for seconds in row.parts.values())
        for whole, *parts in zip(row.seconds, *row.parts.values(), strict=True):
            assert 0 < sum(parts) <= whole
        assert row.peak_bytes is None, "of a GPU only"
    medians = report.to_dict()["rows"][2]["median_seconds_by_part"]
    assert list(medians) == ["forward", "backward", "optimizer", "scaler"]


def test_bytes_saved_for_backward() -> None:
    m = 48
    report = mixprec.compare(OneLinear, [torch.randn(m, 64)])
    for recipe, width in (("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1)):
        extra = report[recipe].saved_bytes - (width * m * 64 + 4 * m * 128)
        if recipe == "fp8":  # the quantized weight is no parameter; and two scales
            assert 64 * 128 < extra <= 64 * 128 + 64
        else:
            assert extra == 0, recipe


def test_gemm_counts(report: mixprec.Report) -> None:
    operands = {
        "fp32": dict.fromkeys(KINDS, "fp32 x fp32 (torch)"),
        "bf16": dict.fromkeys(KINDS, "bf16 x bf16"),
        "fp16": dict.fromkeys(KINDS, "fp16 x fp16"),
        "fp8": dict.fromkeys(KINDS, "e5m2 x e4m3") | {"forward": "e4m3 x e4m3"},
    }
    for recipe, expected in operands.items():
        row = report[recipe]
        assert row.expected == expected
        once = {kind: {formats: STEPS} for kind, formats in expected.items()}
        assert row.gemm_counts("second") == row.gemm_counts("head") == once
        assert row.gemm_counts("first") == once | {"grad_input": {}}, "the data needs no gradient"
        total = {kind: sum(counts.values()) for kind, counts in row.gemm_counts().items()}
        assert total == {"forward": 3 * STEPS, "grad_input": 2 * STEPS, "grad_weight": 3 * STEPS}
    assert report.wrong_gemms(["second", "head"]) == []


def test_wrong_gemms_names_a_layer_that_was_left_out() -> None:
    report = mixprec.compare(
        MLP, data(3), ("bf16", "fp8"), module_filter_fn=lambda module, fqn: fqn != "second"
    )
    wrong = report.wrong_gemms(["second", "head"])
    assert len(wrong) == 6, "two recipes, three GEMMs"
    assert all("of second should have run as" in sentence for sentence in wrong)
    assert wrong[3] == (
        "fp8: forward of second should have run as e4m3 x e4m3 in each of 3 steps, "
        "but ran 3 x (bf16 x bf16 (torch))"
    )
    (never,) = {s.split("but ")[1] for s in report.wrong_gemms(["nowhere"])}
    assert never == "ran nothing"
    report["fp8"].gemms["head", "forward", "e4m3 x e4m3"] -= 1
    assert len(report.wrong_gemms(["head"])) == 1, "one call too few"


def test_overflow_is_skipped_counted_and_backs_off() -> None:
    report = mixprec.compare(
        MLP, data(30), ("fp32", "fp16"), make_scaler=lambda: mixprec.GradScaler(init_scale=2.0**30)
    )
    fp32, fp16 = report.rows
    assert (fp32.skipped_steps, fp32.loss_scale) == (0, None)
    assert 5 < fp16.skipped_steps < 20
    assert fp16.loss_scale == 2.0 ** (30 - fp16.skipped_steps)
    assert fp16.losses[-1] < fp16.losses[0]


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


def test_schedule_optimizer_and_count_are_used() -> None:
    seen: list[float] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            seen.append(self.param_groups[0]["lr"])
            super().step()

    report = mixprec.compare(
        MLP,
        data(3),
        ("fp32",),
        make_optimizer=lambda model: Watched(model.parameters(), lr=0.5),
        schedule=lambda step: 1 / (step + 1),
        count=lambda batch: batch[0].numel(),
    )
    assert seen == [0.5, 0.25, 0.5 / 3]
    row = report["fp32"]
    assert row.units == [SAMPLES * K] * 3
    assert row.skipped_steps == 0
    assert row.optimizer_bytes == 0, "SGD without momentum keeps nothing"


def test_steps_limit_the_batches_and_progress_is_told() -> None:
    calls = []
    report = mixprec.compare(
        MLP, data(9), ("fp32", "fp8"), steps=4, progress=lambda *call: calls.append(call)
    )
    assert [row.recipe for row in mixprec.compare(MLP, data(1), "fp8").rows] == ["fp8"]
    assert [row.steps for row in report.rows] == [4, 4]
    expected = [(r.recipe, i + 1, 4, loss) for r in report.rows for i, loss in enumerate(r.losses)]
    assert calls == expected


def test_validation_is_in_evaluation_mode() -> None:
    modes = []

    class Watched(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x, y)

    with torch.no_grad():  # the caller's mode is not the training's
        mixprec.compare(Watched, data(2), ("fp32",), validation=data(1))
        assert not torch.is_grad_enabled()
    assert modes == [(True, True), (True, True), (False, False)]


def test_a_shuffling_loader_gives_every_recipe_the_same_order() -> None:
    samples = torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*data(4), strict=True)))
    loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
    state, python_state = torch.get_rng_state(), random.getstate()
    one = mixprec.compare(MLP, loader, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    orders = [row.data for row in one.rows]
    assert orders == [orders[0]] * 4

    class DrawsMore(MLP):
        def __init__(self) -> None:
            super().__init__()
            torch.rand(5)

    assert mixprec.compare(DrawsMore, loader, ("bf16",), seed=3)["bf16"].data == orders[0]
    torch.manual_seed(99)  # what was drawn before does not matter, the seed does
    assert mixprec.compare(MLP, loader, ("bf16",), seed=3)["bf16"].losses == one["bf16"].losses
    assert mixprec.compare(MLP, loader, ("bf16",), seed=4)["bf16"].data != orders[0]


def test_data_that_differs_between_recipes_is_refused() -> None:
    seeds = iter(range(100))

    def shuffled() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(data(2, seed=next(seeds)))

    with pytest.raises(ValueError, match=r"same for every recipe, but step 1 of bf16 got other"):
        mixprec.compare(MLP, shuffled)


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
    assert len(str(report).splitlines()) == 6
    seen: list[object] = []
    with mixprec.functional.observed(lambda *call: seen.append(call)):
        mixprec.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
    assert len(seen) == 1, "the interrupted run's own observer is gone"


def test_table_json_and_plot(report: mixprec.Report, tmp_path: Path) -> None:
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["recipe", "loss", "vs", "fp32"]
    assert [line.split()[0] for line in lines[2:]] == list(RECIPES)
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
    with pytest.raises(OSError, match="No space left"):
        getattr(report, kind)(path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_text() == "the old one"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_device_is_written_not_replaced(report: mixprec.Report) -> None:
    with pytest.raises(OSError, match="No space left"):
        report.save("/dev/full")
    assert not os.path.isfile("/dev/full")


def test_plot_without_matplotlib(
    report: mixprec.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'mixprec\[demo\]'"):
        report.plot(tmp_path / "r.png")
    assert list(tmp_path.iterdir()) == []


class Outliers(nn.Module):
    """`one_row` sees a sample, and `all_rows` a feature, that is 2^24 times larger than the rest
    and that its weight ignores: what matters underflows with one scale for the tensor, or even
    for the row."""

    def __init__(self) -> None:
        super().__init__()
        self.one_row, self.all_rows, self.fine = (nn.Linear(K, CLASSES) for _ in range(3))
        for layer in (self.one_row, self.all_rows):
            with torch.no_grad():
                layer.weight[:, 0] = 0.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        row, feature = x.clone(), x.clone()
        row[0] = 0.0
        row[0, 0] = feature[:, 0] = 2.0**24
        out = self.one_row(row) + self.all_rows(feature) + self.fine(x)
        return F.cross_entropy(out.float(), y)


def test_sqnr_is_measured_without_a_trace_and_finds_the_layers_that_lose() -> None:
    recipes = ("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-block")
    measured = mixprec.compare(MLP, data(4), recipes, sqnr=True, validation=data(1))
    plain = mixprec.compare(MLP, data(4), recipes, validation=data(1))
    for row, other in zip(measured.rows, plain.rows, strict=True):
        assert row.losses == other.losses
        assert row.validation_loss == other.validation_loss
        assert (row.skipped_steps, row.gemms) == (other.skipped_steps, other.gemms)
        assert other.sqnr == {}
        assert row.sqnr.keys() == (set() if row.recipe == "fp32" else {"first", "second", "head"})
        for layer in row.sqnr.values():
            assert layer["y"] > 20
            assert layer["grad_weight"] > 20
            assert layer["remedy"] is None
    assert "grad_input" not in measured["fp8"].sqnr["first"], "nothing needs it"
    assert measured["fp16"].sqnr["head"]["y"] > measured["bf16"].sqnr["head"]["y"] > 45
    assert measured.suggest_overrides() == {}
    assert str(measured.suggest_overrides()) == "no layer is below its bar"
    read = json.loads(json.dumps(measured.to_dict()))["rows"][3]
    assert read["sqnr"].keys() == {"first", "second", "head"}


def test_suggested_overrides_name_the_first_recipe_that_clears_the_bars() -> None:
    report = mixprec.compare(Outliers, data(2), ("bf16", "fp8"), lr=0.0, sqnr=True)
    overrides = report.suggest_overrides()
    assert overrides == {"one_row": "fp8-rowwise", "all_rows": "bf16"}
    figures = r"y has 0\.\d dB in fp8, below 18, and [23]\d\.\d in fp8-rowwise"
    assert re.match(figures, overrides.reasons["one_row"])
    assert str(overrides).splitlines()[1].startswith("all_rows: bf16: y has ")
    table = report.sqnr_table()
    assert [line.split()[:2] for line in table.splitlines()[3:]][3:] == [
        *(["fp8", "one_row"], ["fp8", "all_rows"], ["fp8", "fine"])
    ]
    assert re.search(r"one_row .* 0\.\d\*", table)
    assert "... and 4 more" in report.sqnr_table(limit=1)
    assert report.suggest_overrides("bf16") == {}
    model = mixprec.convert(Outliers(), "fp8", overrides=overrides)
    assert model.one_row.recipe.name == "fp8-rowwise"
    assert model.fine.recipe.name == "fp8"
    with pytest.raises(ValueError, match=r"by compare\(sqnr=True\)"):
        mixprec.Report(rows=[Row("fp32")]).suggest_overrides()
    with pytest.raises(KeyError, match="there are bf16, fp8"):
        report.suggest_overrides("fp16")


class NoScalar(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipes": ("fp32", "fp4")}, ValueError, "recipe must be"),
        ({"recipes": ("fp8", "fp8")}, ValueError, "different names"),
        ({"batches": iter(data(1))}, TypeError, "batches must be readable once per recipe"),
        ({"validation": iter(data(1))}, TypeError, "validation must be readable once per recipe"),
        (
            {"max_grad_norm": 1.0, "make_optimizer": lambda model: None},
            ValueError,
            "max_grad_norm must be given to your own optimizer",
        ),
        ({"batches": []}, ValueError, "batches must hold at least one"),
        ({"validation": []}, ValueError, "validation must hold at least one"),
        (
            {"make_model": NoScalar, "batches": [torch.ones(2, 64)]},
            ValueError,
            r"must return one number, got \(2, 128\)",
        ),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mixprec.compare(**({"make_model": MLP, "batches": data(1)} | arguments))
