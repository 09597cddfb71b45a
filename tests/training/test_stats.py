"""mixprec.stats: the measured numbers against plain torch, and that nothing else changes."""

from __future__ import annotations

import gc
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.diagnostics.stats import Monitor, measure, products, records
from mixprec.formats import E4M3, E5M2, FP16
from mixprec.testing import sqnr

Row = dict[str, Any]


def of(monitor: Monitor, layer: str, tensor: str, sample: int = -1) -> Row:
    found = [
        row
        for row in monitor.records[sample]["tensors"]
        if (row["layer"], row["tensor"]) == (layer, tensor)
    ]
    assert len(found) == 1, (layer, tensor, found)
    return found[0]


def one_linear(recipe: str = "fp8", bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return mixprec.convert(nn.Sequential(nn.Linear(16, 24, bias=bias)), recipe)


def one_step(model: nn.Module, x: torch.Tensor, g: torch.Tensor | None = None) -> torch.Tensor:
    y = model(x)
    y.backward(torch.ones_like(y) if g is None else g)
    return y


def measured(model: nn.Module, x: torch.Tensor, **options: Any) -> Monitor:
    with Monitor(model, **options) as monitor:
        one_step(model, x)
        monitor.step()
    return monitor


def quarters(x: torch.Tensor, bits: int, lowest: int) -> torch.Tensor:
    """x rounded to `bits` mantissa bits, with the spacing constant below 2^lowest; FP64."""
    x = x.double()
    exponent = torch.where(x == 0, 0.0, x.abs().clamp(min=2.0**-300).log2().floor())
    step = 2.0 ** (exponent.clamp(min=lowest) - bits)
    return (x / step).round() * step


def by_hand(t: torch.Tensor, fmt: mixprec.Format) -> torch.Tensor:
    """t cast to FP8 with a power of two as its scale, and back; FP64."""
    scale = 2.0 ** math.floor(math.log2(fmt.max / t.abs().max().item()))
    return quarters(t * scale, *((3, -6) if fmt is E4M3 else (2, -14))) / scale


def test_an_fp8_cast_by_hand() -> None:
    model = one_linear()
    x = torch.randn(8, 16)
    x[0, 0], x[1, 1], x[2, 2] = 100.0, 1e-6, 0.0
    g = torch.randn(8, 24)
    with Monitor(model, sqnr=True) as monitor:
        y = one_step(model, x, g)
        monitor.step()
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


def test_the_magnitude_above_which_a_cast_saturates() -> None:
    assert measure.largest_kept(E4M3) == 464
    assert measure.largest_kept(E5M2) == 61440
    assert measure.largest_kept(FP16) == 65520


def test_rows_have_scales_of_their_own() -> None:
    model = one_linear("fp8-rowwise")
    x = torch.ones(3, 16) * torch.tensor([[1.75], [14.0], [0.4375]])
    monitor = measured(model, x)
    row = of(monitor, "0", "x")
    assert (row["scale_min"], row["scale_max"], row["granularity"]) == (32.0, 1024.0, "row")
    assert row["amax"] == 14.0


def test_fp16_overflows_to_inf_and_underflows_to_zero() -> None:
    model = one_linear("fp16", bias=False)
    x = torch.ones(4, 16)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 70000.0, -1e9, 1e-9, 65519.0
    with Monitor(model, sqnr=True) as monitor:
        y = one_step(model, x)
        monitor.step()
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

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(line, parse_constant=refuse)


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
        return self.tied(self.twice(x=x))


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-block"])
def test_no_bit_of_the_model_changes(recipe: str) -> None:
    def train(watched: bool) -> tuple[list[torch.Tensor], nn.Module]:
        torch.manual_seed(0)
        model = mixprec.convert(Net(), recipe)
        monitor = Monitor(model, every=2, sqnr=True)
        if watched:
            monitor.attach()
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = mixprec.optim.AdamW(params, 1e-2)
        for _ in range(4):
            y = one_step(model, torch.randn(8, 16))
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        monitor.close()
        assert len(monitor.records) == 2
        if watched:
            assert of(monitor, "twice", "x")["calls"] == 2
            assert of(monitor, "tied", "w")["amax"] == of(monitor, "twice", "w")["amax"]
            rows = monitor.records[0]["tensors"]
            assert not [r for r in rows if (r["layer"], r["tensor"]) == ("frozen", "g")]
        return [y.detach(), *model.state_dict().values()], model

    plain, _ = train(False)
    watched, model = train(True)
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks for m in model.modules()), "close() removes the hooks"


def test_nothing_waits_for_the_device_before_flush() -> None:
    """A fake tensor has no value: whoever asks for one raises."""
    with torch._subclasses.FakeTensorMode():
        model = mixprec.convert(Net(), "fp8-delayed")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        monitor = Monitor(model, every=1, sqnr=True, scaler=mixprec.GradScaler()).attach()
        for _ in range(2):
            one_step(model, torch.randn(8, 16))
            optimizer.step()
            monitor.step()
        # x, w, y of four calls, and g of the three that are not frozen.
        assert len(monitor._samples) == 2 * (4 * 3 + 3)
        with pytest.raises(RuntimeError):
            monitor.flush()
    # No layer of fake tensors may be left for the optimizer steps of other tests to update.
    del model, optimizer, monitor
    gc.collect()


def test_one_transfer_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> object:
        calls.append(self.shape)
        return plain(self)

    model = mixprec.convert(Net(), "fp8")
    monitor = Monitor(model, every=1).attach()
    for _ in range(3):
        one_step(model, torch.randn(8, 16))
        monitor.step()
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    assert monitor.records == []
    monitor.flush()
    assert len(calls) == 1
    assert [r["step"] for r in monitor.records] == [0, 1, 2]
    monitor.close()
    assert len(monitor.records) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_counts_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.last = nn.Linear(16, 16)  # after it: a repeated forward ends where it may

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: self.last(self.inner(x)), x, use_reentrant=reentrant)

    model = mixprec.convert(Checkpointed(), "fp8")
    monitor = measured(model, torch.randn(8, 16, requires_grad=True))
    assert [of(monitor, "inner", t)["calls"] for t in "xwgy"] == [1, 1, 1, 1]


def test_passes_without_grad_and_steps_between_samples_leave_nothing() -> None:
    model = one_linear()
    with Monitor(model, every=3) as monitor:
        with torch.no_grad():
            model(torch.randn(2, 16))
        one_step(model, torch.ones(2, 16))
        with mixprec.autocast(enabled=False):
            one_step(model, torch.ones(5, 16))
        with mixprec.autocast("bf16"):
            one_step(model, torch.ones(7, 16))
        for _ in range(5):
            monitor.step()
            one_step(model, torch.ones(3, 16))
    assert [record["step"] for record in monitor.records] == [0, 3]
    first = [r for r in monitor.records[0]["tensors"] if r["tensor"] == "x"]
    assert [(r["format"], r["elements"]) for r in first] == [("e4m3", 32), ("bf16", 112)]


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
    with Monitor(model, sqnr=True) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.sum().backward()
        monitor.step()
    row = of(monitor, "0", "y")
    ref = x @ model[0].weight.detach().t() + model[0].bias.detach()
    assert row["format"] == "bf16"
    assert math.isclose(row["sqnr"], sqnr(ref, y.detach()), rel_tol=1e-4)


def test_compiled_layers_are_left_alone() -> None:
    model = one_linear()
    with Monitor(model, every=1) as monitor:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        y = one_step(compiled, torch.ones(2, 16))
        monitor.step()
    torch._dynamo.reset()
    assert monitor.records[0]["tensors"] == []
    assert torch.equal(y, model(torch.ones(2, 16)))


def test_loss_scale_and_skipped_steps() -> None:
    model = one_linear("fp16")
    optimizer = mixprec.optim.AdamW(model.parameters(), 1e-3)
    scaler = mixprec.GradScaler(init_scale=1024.0)
    seen: dict[str, list[Any]] = {"scaler": [], "optimizer": []}
    monitors = {
        "scaler": Monitor(model, every=1, scaler=scaler).attach(),
        "optimizer": Monitor(model, every=1, optimizer=optimizer).attach(),
    }
    for factor in (1.0, math.inf, 1.0):
        scaler.scale((model(torch.ones(4, 16)) * factor).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for monitor in monitors.values():
            monitor.step()
    for name, monitor in monitors.items():
        seen[name] = [(r["loss_scale"], r["skipped_steps"]) for r in monitor.flush()]
        monitor.close()
    assert seen["scaler"] == [(1024.0, 0), (1024.0, 1), (512.0, 1)], "of the step, not the next"
    assert [skipped for _, skipped in seen["optimizer"]] == [0, 1, 1]
    g = of(monitors["scaler"], "0", "g", 0)
    assert math.isclose(g["amax"], 1024 / 96, rel_tol=1e-6), "g carries the loss scale"
    assert of(monitors["scaler"], "0", "g", 1)["inf"] == 4 * 24


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
    with Monitor(model) as monitor:
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        model(torch.full((2, 16), 60000.0).half())
        monitor.step()
    assert monitor.records[0]["clipped"] == {"0": 48}
    assert "48 activations clipped" in monitor.table()


def test_table_is_legible_and_worst_first() -> None:
    torch.manual_seed(0)
    name = "encoder_of_the_first_modality_with_a_long_name"
    model = nn.Sequential()
    model.add_module(name, nn.Linear(16, 16))
    model.add_module("bad", nn.Linear(16, 16))
    mixprec.convert(model, "fp8")
    with torch.no_grad():
        model.bad.weight[0, 0] = 1e6  # beside which the others become 0
    monitor = measured(model, torch.randn(4, 16), sqnr=True)
    lines = monitor.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "step 0"
    assert lines[3].split()[:3] == ["bad", "w", "e4m3"]
    assert len(lines) == 3 + 2 * 4
    assert sum("..." in line and "long_name" in line for line in lines) == 4
    assert len(monitor.table(limit=2).splitlines()) == 3 + 2 + 1


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.seen.append((tag, value, step))


def test_outputs_take_only_what_is_new(tmp_path: Path) -> None:
    model, path, writer = one_linear(), tmp_path / "r.jsonl", Recorder()
    path.write_text('{"cut sho')
    with Monitor(model, every=1) as monitor:
        for _ in range(2):
            for _ in range(2):
                one_step(model, torch.ones(2, 16))
                monitor.step()
            monitor.flush()
            monitor.to_jsonl(path)
            monitor.to_tensorboard(writer)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"cut sho'
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 1, 2, 3]
    assert json.loads(lines[1])["tensors"] == records.finite(monitor.records[0]["tensors"])
    assert [s for tag, _, s in writer.seen if tag == "amax/x/0"] == [0, 1, 2, 3]
    assert ("scale_max/x/0", 256.0, 0) in writer.seen


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page = (Path(__file__).parents[2] / "docs" / "stats.md").read_text(encoding="utf-8")
    page = page[: page.index("## How these figures were made")]
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len((tmp_path / "numbers.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "numbers.png").stat().st_size > 10_000
    assert names["overrides"] == {}


def test_the_picture_names_three_layers_of_many() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from mixprec.diagnostics import plotting

    torch.manual_seed(0)
    model = mixprec.convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))), "fp8")
    with Monitor(model, every=1) as monitor:
        for scale in (1.0, 10.0):
            one_step(model, scale * torch.randn(4, 16))
            monitor.step()
    above, middle, below = (plotting.plot_records(monitor.records).axes[i] for i in (0, 3, 6))
    assert len(above.lines) == len(middle.lines) == 12
    assert len(above.get_legend().get_texts()) == 3
    assert above.get_legend().get_title().get_text() == "and 9 others in grey"
    by_layer = {tuple(line.get_ydata()) for line in above.lines}
    rows = [of(monitor, "0", "x", sample)["amax"] for sample in (0, 1)]
    assert tuple(rows) in by_layer
    assert [len(line.get_xdata()) for line in below.lines] == [2] * 4


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        Monitor([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have layers with a recipe"):
        Monitor(nn.Linear(2, 2))
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every must be an int of 1 or more"):
            Monitor(one_linear(), every=every)  # type: ignore[arg-type]
    assert Monitor(one_linear()).table() == "nothing was sampled"
    Monitor(one_linear()).to_jsonl(tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []


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
    found = products.product_sqnr(layer, x, g)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert got is not None
        assert math.isclose(got, value, abs_tol=1e-4), name
    assert layer.weight.grad is None
    layer.weight.requires_grad_(False)
    assert products.product_sqnr(layer, plain, g).keys() == {"x", "w", "g", "y"}


def test_a_model_is_as_before_after_it_was_measured() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 4, 1))
    model = mixprec.convert(nn.Sequential(*parts), "fp8-delayed")
    x = torch.randn(2, 3, 8, 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    staged = [(b, b.clone()) for b in model.buffers()]
    state = torch.get_rng_state()
    found = products.model_sqnr(model, lambda: model(x).square().sum().backward())
    assert torch.equal(torch.get_rng_state(), state)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert all(torch.equal(b, value) for b, value in staged)
    assert not any(m._forward_hooks for m in model.modules())
    assert found.keys() == {"0", "3"}
    assert found["0"].keys() == {"recipe", "x", "w", "g", "y", "grad_weight", "remedy"}
    assert all(20 < found[layer]["y"] < 45 for layer in "03")
