"""freeze: weight-only modules for inference in 8 and 4 bits, their report, saving and loading."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import independent as ind
import pytest
import torch
from cases import WIDE, for_each, pairwise
from independent import assert_same_lists
from layer_cases import Adapted, Own, Twice
from torch import nn

import mixprec
from mixprec.frozen import FORMATS, FrozenLinear
from mixprec.frozen_linear import STORAGES
from mixprec.ops.quantize import dequantize_int8, quantize_int8

# dB; bytes of the weight of the first layer of `mlp`.
SQNR = {"int8": 35.0, "fp8": 25.0, "mxfp4": 15.5, "nvfp4": 16.0}
BYTES = {
    "int8": 130 * 96 + 4 * 130,
    "fp8": 130 * 96 + 4 * 130,
    "mxfp4": 130 * 96 // 2 + 130 * 3,
    "nvfp4": 130 * 96 // 2 + 130 * 6 + 4,
}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 130), nn.GELU(), nn.Linear(130, 33, bias=False))


@for_each("dtype", WIDE)
def test_int8_by_hand(dtype: torch.dtype) -> None:
    w = torch.tensor([[254.0, -1.0, 3.0], [0.0, 0.0, 0.0], [-1e-45, 0.0, 0.0]]).to(dtype)
    data, scale_inv = quantize_int8(w)
    # first row: scale 127 / 254 = 0.5; -0.5 and 1.5 are ties, rounded to the even code
    assert data[:2].tolist() == [[127, 0, 2], [0, 0, 0]]
    assert scale_inv[:2, 0].tolist() == [2.0, 1.0]
    assert scale_inv.isfinite().all()
    assert dequantize_int8(data, scale_inv, torch.float32)[0].tolist() == [254.0, 0.0, 4.0]
    assert quantize_int8(torch.ones(2, 0))[1].tolist() == [[1.0], [1.0]]


CASTS = {
    "fp8": ("e4m3", {"granularity": "row", "power_of_two_scale": False}),
    "mxfp4": ("e2m1", {"granularity": "mx", "scale_mode": "even"}),
    "nvfp4": ("e2m1", {"granularity": "nvfp4"}),
}


@for_each("fmt", list(CASTS))
def test_codes_and_scales_are_those_of_quantize(fmt: str) -> None:
    linear = mlp()[0]
    frozen, (name, options) = FrozenLinear.from_linear(linear, fmt, torch.bfloat16), CASTS[fmt]
    q = mixprec.quantize(linear.weight.detach(), name, **options)
    want = [t for t in (q.data, q.scale_inv, q.tensor_scale_inv) if t is not None]
    assert len(frozen.stored) == len(want)
    assert all(map(torch.equal, frozen.stored, want))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w must be \[N, K\], got shape \(3,\)"):
        quantize_int8(torch.ones(3))
    with pytest.raises(ValueError, match="w must have dtype"):
        quantize_int8(torch.ones(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="fmt must be one of"):
        mixprec.freeze(mlp(), "int4")
    with pytest.raises(ValueError, match="compute_dtype must be"):
        mixprec.freeze(mlp(), compute_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"one of \('int8', .* got 'nf4'; load .* bitsandbytes"):
        mixprec.freeze(mlp(), "nf4")
    frozen, _ = mixprec.freeze(mlp(), "nvfp4")
    with pytest.raises(TypeError, match=r"input must be fp32, bf16 or fp16, got torch\.int8"):
        frozen(torch.ones(2, 96, dtype=torch.int8))


@for_each("fmt, bad", pairwise(FORMATS, [float("nan"), float("inf")]))
def test_a_weight_that_is_not_finite_is_refused_by_name(fmt: str, bad: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[3, 4] = bad
    with pytest.raises(ValueError, match=r"freeze: 2: .* must be finite"):
        mixprec.freeze(model, fmt)
    assert type(model[0]) is nn.Linear  # nothing was changed


@pytest.mark.parametrize("fmt", FORMATS)
def test_outputs_are_close_to_the_trained_model(fmt: str) -> None:
    model = mlp()
    x = torch.randn(4, 7, 96)
    expected = model(x)
    limit = SQNR[fmt]
    for dtype in WIDE:
        frozen, report = mixprec.freeze(copy.deepcopy(model), fmt)
        before = [t.clone() for t in frozen[0].stored]
        y = frozen.to(dtype)(x.to(dtype))
        assert_same_lists(frozen[0].stored, before)
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        assert mixprec.testing.sqnr(expected, y) >= limit
        assert all(layer.sqnr >= limit for layer in report.layers)
        assert frozen[0].weight.element_size() == 1

    frozen, report = mixprec.freeze(model, fmt)
    first = report.layers[0]
    assert (first.name, first.shape) == ("0", (130, 96))
    assert (first.bytes_before, first.bytes_after) == (4 * 130 * 96, BYTES[fmt])
    assert first.bits == 8 * BYTES[fmt] / (130 * 96)
    assert f"{first.bits:.3f}" in str(report)
    assert report.bytes_before == 4 * (130 * 96 + 130 + 33 * 130)
    assert report.bytes_after == sum(t.nbytes for t in frozen.state_dict().values())
    assert "the whole model: " in str(report)
    assert "130 x 96" in str(report)


@pytest.mark.parametrize("fmt", FORMATS)
def test_save_and_load_on_meta(fmt: str, tmp_path: Path) -> None:
    model, _ = mixprec.freeze(mlp(), fmt)
    x = torch.randn(5, 96)
    torch.save(model.state_dict(), tmp_path / "frozen.pt")
    with torch.device("meta"):
        empty = mlp()
    empty, report = mixprec.freeze(empty, fmt)
    assert all(layer.sqnr != layer.sqnr for layer in report.layers)  # nan: nothing to compare
    empty.load_state_dict(torch.load(tmp_path / "frozen.pt", weights_only=True), assign=True)
    assert torch.equal(empty(x), model(x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_copies_and_what_is_compiled_compute_the_same(fmt: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(37, 21)  # an odd K, and a ragged last block
    frozen, _ = mixprec.freeze(copy.deepcopy(plain), fmt)
    x = torch.randn(5, 37)
    want = frozen(x)
    converted, _ = mixprec.freeze(mixprec.convert(plain, "fp8"), fmt)
    torch.save(frozen, tmp_path / "layer.pt")  # pickled; pickle itself takes no FP8 tensors
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    for other in (copy.deepcopy(frozen), loaded, converted):
        assert torch.equal(other(x), want)
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), want)
    w = frozen.dequantize()
    assert (w.dtype, w.shape) == (torch.float32, (21, 37))
    ind.assert_same_bits(frozen.decoded(torch.bfloat16), w.bfloat16())
    assert frozen.weight.dtype in (torch.int8, torch.float8_e4m3fn)
    assert f"in_features=37, out_features=21, bias=True, {fmt}{STORAGES[fmt].scales}" in repr(
        frozen
    )


def test_adapters_stay_trainable_and_subclasses_are_judged_by_their_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(BaseTunerLayer=Adapted)
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", module)
    layers = {"adapted": Adapted(16), "own": Own(16, 16), "twice": Twice(16, 16)}
    model = nn.ModuleDict({**layers, "attention": nn.MultiheadAttention(16, 2)})
    mixprec.convert(model, "bf16")
    model, report = mixprec.freeze(model)
    assert {layer.name for layer in report.layers} == {"adapted.base_layer", "own"}
    assert set(report.left.items()) == {
        (f"adapted.lora_{name}.default", "an adapter of peft") for name in "AB"
    }
    assert all(p.requires_grad for p in model["adapted"].parameters())
    assert isinstance(model["twice"], Twice)
    x = torch.randn(3, 2, 16)
    with mixprec.autocast(enabled=False):  # which reads the weight of attention's projection
        model["attention"](x, x, x)


def test_what_stays_and_why() -> None:
    parts = {"body": nn.Linear(16, 16), "embedding": nn.Embedding(10, 16)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(16, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    model, report = mixprec.freeze(model, "int8")
    assert [type(m) for m in model.values()] == [FrozenLinear, nn.Embedding, nn.Linear]
    assert report.left == {"head": "its weight is shared with another module"}
    _, report = mixprec.freeze(mlp(), module_filter_fn=lambda m, fqn: fqn == "2")
    assert [layer.name for layer in report.layers] == ["2"]
    assert "0" in report.left


def test_a_root_that_is_a_linear_and_gradients_to_the_input() -> None:
    root, _ = mixprec.freeze(nn.Linear(8, 4), "int8")
    x = torch.randn(3, 8, requires_grad=True)
    root(x).sum().backward()
    assert isinstance(root, FrozenLinear)
    assert not list(root.parameters())
    column_sums = root.decoded(torch.bfloat16).float().sum(0)
    torch.testing.assert_close(x.grad, column_sums.expand(3, 8), rtol=2**-7, atol=2**-7)
    assert "in_features=8, out_features=4, bias=True, int8/row" in repr(root)


@for_each("fmt, other", [(a, b) for a in FORMATS for b in FORMATS if a != b])
def test_a_state_dict_of_another_format_is_refused(fmt: str, other: str) -> None:
    """Also with one input, where all shapes agree; and codes never pass for weights."""
    for k in (1, 8):
        frozen, _ = mixprec.freeze(nn.Linear(k, 4), fmt)
        kept = {name: t.clone() for name, t in frozen.state_dict().items()}
        wrong = mixprec.freeze(nn.Linear(k, 4), other)[0].state_dict()
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"weight_|FrozenLinear"):
                frozen.load_state_dict(wrong, assign=assign)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight_codes"'):
            frozen.load_state_dict(nn.Linear(k, 4).state_dict())
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight"'):
            nn.Linear(k, 4).load_state_dict(kept)
        now = frozen.state_dict()
        assert all(torch.equal(now[n], t) for n, t in kept.items() if "bias" not in n)


@for_each("fmt", FORMATS)
def test_hooks_attributes_and_own_forwards(fmt: str) -> None:
    model, called = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4), nn.Linear(4, 4)), []
    handle = model[0].register_forward_hook(lambda module, args, out: 2 * out)
    model[0].register_full_backward_hook(lambda *_: called.append(1))
    model[0].label = "first"
    plain = model[1].forward
    model[1].forward = lambda x: 2 * plain(x)
    model, report = mixprec.freeze(model, fmt)
    assert report.left == {"1": "its forward pass was replaced"}
    assert model[0].label == "first"
    x = torch.randn(3, 32, requires_grad=True)
    twice = model[0](x)
    twice.sum().backward()
    handle.remove()
    assert torch.equal(twice, 2 * model[0](x))
    assert called == [1]


@for_each("fmt", FORMATS)
def test_trained_biases_casts_and_encoders(fmt: str) -> None:
    linear = nn.Linear(32, 8)
    linear.weight.requires_grad_(False)  # as bias="all" of peft leaves it
    bias = linear.bias
    frozen, _ = mixprec.freeze(linear, fmt)
    assert frozen.bias is bias
    frozen(torch.randn(3, 32)).sum().backward()
    assert torch.equal(bias.grad, torch.full((8,), 3.0))
    assert frozen.to(torch.bfloat16).source_dtype == frozen.bias.dtype == torch.bfloat16
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    want = encoder(x)
    with torch.no_grad():
        assert (mixprec.freeze(encoder, fmt)[0](x) - want).abs().max() < 1
