"""mixprec.stats: the measured numbers against plain torch and numbers by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import as_bytes
from independent import BY_DTYPE, cast, decode_table
from torch import nn

import mixprec
from mixprec.diagnostics import measure
from mixprec.diagnostics.suggest import model_sqnr
from mixprec.formats import E4M3, E5M2, FP16
from mixprec.ops._reference.block_formats import hadamard
from mixprec.stats import Monitor
from mixprec.testing import sqnr

Row = dict[str, Any]


def of(monitor: Monitor, layer: str, tensor: str, sample: int = -1) -> Row:
    rows = monitor.records[sample]["tensors"]
    (found,) = (row for row in rows if (row["layer"], row["tensor"]) == (layer, tensor))
    return found


def one_linear(recipe: str = "fp8", bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return mixprec.convert(nn.Sequential(nn.Linear(16, 24, bias=bias)), recipe)


def one_step(model: nn.Module, x: torch.Tensor, g: torch.Tensor | None = None) -> torch.Tensor:
    y = model(x)
    y.backward(torch.ones_like(y) if g is None else g)
    return y


def measured(
    model: nn.Module, *xs: torch.Tensor, g: torch.Tensor | None = None, **options: Any
) -> Monitor:
    """A step of each x, all of them sampled."""
    with Monitor(model, every=1, **options) as monitor:
        for x in xs:
            one_step(model, x, g)
            monitor.step()
    return monitor


def by_hand(t: torch.Tensor, fmt: mixprec.Format) -> torch.Tensor:
    """t cast to FP8 with a power of two as its scale, and back; FP64."""
    spec, scale = BY_DTYPE[fmt.dtype], 2.0 ** math.floor(math.log2(fmt.max / t.abs().max().item()))
    return torch.from_numpy(decode_table(spec)[cast(t, scale, spec)]) / scale


class Net(nn.Module):
    """Reuses a layer, has a frozen one, one in place after it, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.twice = nn.Linear(16, 16)
        self.relu = nn.ReLU(inplace=True)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        x = self.relu(self.twice(x))
        return self.tied(self.twice(input=x))


def test_an_fp8_cast_by_hand() -> None:
    model = one_linear()
    x = torch.randn(8, 16)
    x[0, 0], x[1, 1], x[2, 2] = 100.0, 1e-6, 0.0
    g = torch.randn(8, 24)
    monitor, y = measured(model, x, g=g, sqnr=True), model(x)
    for tensor, t, fmt in (("x", x, E4M3), ("w", model[0].weight.detach(), E4M3), ("g", g, E5M2)):
        row = of(monitor, "0", tensor)
        amax = t.abs().max().item()
        scale = 2.0 ** math.floor(math.log2(fmt.max / amax))
        rounded = by_hand(t, fmt)
        assert (row["amax"], row["scale_min"], row["scale_max"]) == (amax, scale, scale)
        assert (row["elements"], row["calls"], row["format"]) == (t.numel(), 1, fmt.name)
        lost = ((t != 0) & (rounded == 0)).sum().item()
        assert row["underflow"] == lost / t.numel()
        assert row["overflow"] == row["inf"] == row["nan"] == 0
        assert math.isclose(row["sqnr"], sqnr(t, rounded), rel_tol=1e-9)
    assert of(monitor, "0", "x")["underflow"] == 1 / x.numel(), "the 1e-6 beside the 100"
    product = x @ model[0].weight.detach().t() + model[0].bias.detach()
    row = of(monitor, "0", "y")
    assert row["amax"] == y.abs().max().item()
    assert math.isclose(row["sqnr"], sqnr(product, y.detach()), rel_tol=1e-4)
    assert row["format"] == "fp32"


def test_delayed_scaling_saturates_with_the_scale_of_the_step_before() -> None:
    model = one_linear("fp8-delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first = torch.full((4, 16), 1.75)  # amax 1.75 and maximum 448: the scale is 256
    second = torch.full((4, 16), 1.0)
    second[0, :3] = torch.tensor([1.8, 1.83, -3.0])  # times 256: 460.8, 468.5 and -768
    second[1, 0] = 1e-8
    with Monitor(model, every=1) as monitor:
        for x in (first, second):
            one_step(model, x)
            optimizer.step()
            monitor.step()
    before, after = of(monitor, "0", "x", 0), of(monitor, "0", "x", 1)
    assert (before["scale_min"], before["overflow"]) == (256.0, 0.0)
    assert (after["scale_min"], after["scale_max"], after["amax"]) == (256.0, 256.0, 3.0)
    assert after["overflow"] == 2 / 64, "460.8 rounds to 448 without saturating"
    assert after["underflow"] == 1 / 64
    assert after["sqnr"] is None or math.isnan(after["sqnr"]), "not asked for"


def test_rows_have_scales_of_their_own() -> None:
    x = torch.ones(3, 16) * torch.tensor([[1.75], [14.0], [0.4375]])
    row = of(measured(one_linear("fp8-rowwise"), x), "0", "x")
    assert (row["scale_min"], row["scale_max"], row["granularity"]) == (32.0, 1024.0, "row")
    assert row["amax"] == 14.0


def test_fp16_overflows_to_inf_and_underflows_to_zero() -> None:
    model = one_linear("fp16", bias=False)
    x = torch.ones(4, 16)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 70000.0, -1e9, 1e-9, 65519.0
    monitor, y = measured(model, x, sqnr=True), model(x)
    row = of(monitor, "0", "x")
    assert (row["overflow"], row["underflow"]) == (2 / 64, 1 / 64)
    assert (row["inf"], row["nan"], row["scale_min"]) == (0, 0, 1.0)
    assert math.isnan(row["sqnr"])
    out = of(monitor, "0", "y")
    wrong = (~torch.isfinite(y)).sum().item()
    assert wrong >= 1
    assert out["inf"] + out["nan"] == wrong
    assert out["overflow"] == wrong / y.numel()


def test_inf_and_nan_are_counted_and_survive_json(tmp_path: Path) -> None:
    model = one_linear()
    x = torch.ones(2, 16)
    x[0, 0], x[0, 1], x[1, 0] = math.nan, math.inf, -math.inf
    monitor = measured(model, x, sqnr=True)
    row = of(monitor, "0", "x")
    assert (row["nan"], row["inf"]) == (1, 2)
    assert math.isnan(row["amax"])
    first, second = monitor.table().splitlines()[3:5]
    assert first.split()[1::6] == ["y", "0/48"], "all of the output is NaN: the worst"
    assert second.split()[1::6] == ["x", "2/1"]
    monitor.to_jsonl(tmp_path / "r.jsonl")
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_micro_batches_of_one_step_are_one_row() -> None:
    model = one_linear()
    xs = [torch.full((2, 16), 14.0), torch.full((3, 16), 1.75)]
    xs[1][0, 0] = 1e-6
    with Monitor(model, sqnr=True) as monitor:
        for x in xs:
            one_step(model, x)
        monitor.step()
    row = of(monitor, "0", "x")
    assert (row["calls"], row["elements"], row["amax"]) == (2, 80, 14.0)
    assert (row["scale_min"], row["scale_max"]) == (32.0, 256.0)
    assert row["underflow"] == 1 / 80
    signal = sum(x.double().square().sum().item() for x in xs)
    noise = xs[1][0, 0].double().item() ** 2  # all else is exact
    assert math.isclose(row["sqnr"], 10 * math.log10(signal / noise), rel_tol=1e-9)


def test_empty_tensors() -> None:
    model = one_linear()
    monitor = measured(model, torch.zeros(0, 16), sqnr=True)
    row = of(monitor, "0", "x")
    assert (row["elements"], row["amax"], row["overflow"], row["sqnr"]) == (0, 0.0, None, None)
    assert "0" in monitor.table()


def test_under_torch_autocast_the_reference_stays_fp32() -> None:
    model = one_linear("bf16")
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        monitor, y = measured(model, x, sqnr=True), model(x)
    row = of(monitor, "0", "y")
    ref = x @ model[0].weight.detach().t() + model[0].bias.detach()
    assert row["format"] == "bf16"
    assert math.isclose(row["sqnr"], sqnr(ref, y.detach()), rel_tol=1e-4)


def test_loss_scale_and_skipped_steps() -> None:
    model = one_linear("fp16")
    optimizer = mixprec.optim.AdamW(model.parameters(), 1e-3)
    scaler = mixprec.GradScaler(init_scale=1024.0)
    with (
        Monitor(model, every=1, scaler=scaler) as by_scaler,
        Monitor(model, every=1, optimizer=optimizer) as by_optimizer,
    ):
        for factor in (1.0, math.inf, 1.0):
            scaler.scale((model(torch.ones(4, 16)) * factor).float().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            by_scaler.step()
            by_optimizer.step()
    seen = [(r["loss_scale"], r["skipped_steps"]) for r in by_scaler.records]
    assert seen == [(1024.0, 0), (1024.0, 1), (512.0, 1)], "of the step, not the next"
    assert [r["skipped_steps"] for r in by_optimizer.records] == [0, 1, 1]
    g = of(by_scaler, "0", "g", 0)
    assert math.isclose(g["amax"], 1024 / 96, rel_tol=1e-6), "g carries the loss scale"
    assert of(by_scaler, "0", "g", 1)["inf"] == 4 * 24


def test_conv_layers() -> None:
    torch.manual_seed(0)
    kinds = {"plain": nn.Conv2d(4, 8, 3, padding=1), "pixels": nn.Conv2d(8, 6, 1, stride=2)}
    model = mixprec.convert(nn.Sequential(*kinds.values()), "fp8-rowwise")
    x = torch.randn(2, 4, 8, 8)
    monitor = measured(model, x, sqnr=True)
    row = of(monitor, "0", "x")
    per_sample = 448 / x.flatten(1).abs().amax(1)
    assert row["scale_max"] == 2.0 ** math.floor(math.log2(per_sample.max().item()))
    assert of(monitor, "1", "x")["elements"] == 2 * 8 * 4 * 4, "with a stride it reads a quarter"
    for layer in "01":
        assert 20 < of(monitor, layer, "y")["sqnr"] < 60
        assert of(monitor, layer, "g")["calls"] == 1


def test_clipped_outputs_are_counted() -> None:
    recipe = mixprec.Recipe("fp16", FP16, FP16, FP16, clip_activations=True)
    model = mixprec.convert(nn.Sequential(nn.Linear(16, 24, bias=False)), recipe).half()
    nn.init.ones_(model[0].weight)
    monitor = measured(model, torch.full((2, 16), 60000.0).half())
    assert monitor.records[0]["clipped"] == {"0": 48}
    assert "48 activations clipped" in monitor.table()


def test_products_by_hand() -> None:
    model = one_linear(bias=False)
    layer = model[0]
    torch.manual_seed(1)
    x, g = torch.randn(32, 16, requires_grad=True), torch.randn(32, 24)
    w = layer.weight.detach()
    plain = x.detach()
    qx, qw, qg = by_hand(plain, E4M3), by_hand(w, E4M3), by_hand(g, E5M2)
    expected = {
        "x": sqnr(plain, qx),
        "w": sqnr(w, qw),
        "g": sqnr(g, qg),
        "y": sqnr(plain.double() @ w.double().t(), qx @ qw.t()),
        "grad_input": sqnr(g.double() @ w.double(), qg @ qw),
        "grad_weight": sqnr(g.double().t() @ plain.double(), qg.t() @ qx),
    }
    found = model_sqnr(model, lambda: model(x).backward(g))["0"]
    assert (found.pop("recipe"), found.pop("remedy")) == ("fp8", None)
    assert found == pytest.approx(expected, abs=1e-3)
    layer.weight.requires_grad_(False)
    found = model_sqnr(model, lambda: model(x).backward(g))["0"]
    assert found.keys() == {"recipe", "x", "w", "g", "y", "grad_input", "remedy"}


def test_the_output_of_a_layer_with_outliers_is_measured_whole() -> None:
    torch.manual_seed(0)
    model = mixprec.convert(nn.Sequential(nn.Linear(96, 48)), "fp8+outliers-0.03")
    x = torch.randn(64, 96).index_fill(1, torch.tensor([3, 95]), 100.0)
    mixprec.choose_outliers(model, [x])
    found = model_sqnr(model, lambda: model(x).sum().backward())["0"]
    exact = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert found["y"] == pytest.approx(sqnr(exact, model(x)), abs=0.1)


def test_a_model_is_as_before_after_it_was_measured() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 4, 1))
    model = mixprec.convert(nn.Sequential(*parts), "fp8-delayed")
    x = torch.randn(2, 3, 8, 8)
    parts = [*model.parameters(), *model.buffers()]
    before = as_bytes([parts, model.state_dict(), torch.get_rng_state()])
    found = model_sqnr(model, lambda: model(x).square().sum().backward())
    assert as_bytes([parts, model.state_dict(), torch.get_rng_state()]) == before
    assert not any(m._forward_hooks for m in model.modules())
    assert found.keys() == {"0", "3"}
    assert found["0"].keys() == {"recipe", "x", "w", "g", "y", "grad_weight", "remedy"}
    assert all(20 < found[layer]["y"] < 45 for layer in "03")


def test_a_histogram_of_what_is_no_tensor_of_numbers_is_refused() -> None:
    assert mixprec.stats.histogram(torch.ones(2, 3)).counts == {127 << 4: 6}
    assert mixprec.stats.histogram(torch.ones(0)).counts == {}
    with torch.device("meta"):
        assert mixprec.stats.histogram(torch.full((2,), 1.1, device="cpu")).counts == {2033: 2}
    numbers = torch.ones(1 << 22).bfloat16().repeat(2)[:-1]
    assert mixprec.stats.histogram(numbers[::1].requires_grad_()).counts == {127 << 4: 2**23 - 1}
    for wrong, said in (
        (torch.ones(2, dtype=torch.long), "got Tensor torch.int64"),
        (torch.ones(2, device="meta"), "got Tensor torch.float32"),
        (torch.ones(2, 2).to_sparse(), "got Tensor"),
        ([1.0], "got list"),
    ):
        with pytest.raises(TypeError, match=f"histogram: tensor must be a dense .*{said}$"):
            mixprec.stats.histogram(wrong)


def test_a_product_is_measured_as_the_recipe_rotates_it() -> None:
    recipe = dataclasses.replace(mixprec.Recipe.parse("nvfp4-1x16"), stochastic_rounding=())
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    for roles, turn in ((("x", "w"), lambda t: t), (("g", "x"), hadamard)):
        kept = [mixprec.quantize(turn(t), "e2m1", granularity="nvfp4") for t in (a, b)]
        want = mixprec.dequantize(kept[0]) @ mixprec.dequantize(kept[1]).t()
        torch.testing.assert_close(measure.product(recipe, roles, a, b), want)
