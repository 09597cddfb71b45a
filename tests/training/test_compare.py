"""compare(): the same task for each recipe, honest measurements, and what they suggest."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from compare_task import CLASSES, HIDDEN, MLP, RECIPES, STEPS, K, data
from torch import nn

import mixprec
from mixprec.diagnostics.report import KINDS, Row


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns_and_stays_near_fp32(report: mixprec.Report, recipe: str) -> None:
    row = report[recipe]
    assert (row.status, row.steps, len(row.losses)) == ("complete", STEPS, STEPS)
    assert row.validation_loss < 0.8 * row.losses[0]
    assert abs(report.difference(row)) < 0.05
    assert row.speed > 0
    assert len(set(row.data)) == STEPS
    assert row.data == report["fp32"].data
    # Before the first update the runs differ by the rounding of their formats alone.
    assert math.isclose(row.losses[0], report["fp32"].losses[0], rel_tol=0.03)


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


def test_bytes_of_parameters_gradients_and_state(report: mixprec.Report) -> None:
    norm = 2 * HIDDEN
    n = sum(p.numel() for p in MLP().parameters()) - norm
    tensors = len(list(MLP().parameters()))
    for recipe, width, masters in (("fp32", 4, 0), ("bf16", 2, 4), ("fp16", 2, 4), ("fp8", 2, 4)):
        row = report[recipe]
        assert row.parameter_bytes == row.gradient_bytes == width * n + 4 * norm
        moments = row.optimizer_bytes - (8 + masters) * n - 8 * norm
        assert 0 <= moments <= 8 * tensors, "besides the moments and masters only a step count each"


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
