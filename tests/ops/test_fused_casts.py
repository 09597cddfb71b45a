"""act_quantize and norm_quantize: the activations, what the public functions compute, cast as by
quantize, and rows that are not finite. test_values.py has the casts."""

from __future__ import annotations

import itertools
import math

import independent as ind
import pytest
import torch
from cases import for_each, normal
from emulated.values.test_fused import PLAIN

import mixprec
from mixprec.ops import act_quantize, norm_quantize
from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference import scale_layout
from mixprec.ops.act_quantize import KINDS
from mixprec.ops.norm_quantize import norm_quantize_op


def same_quantized(got: mixprec.Quantized, want: mixprec.Quantized) -> None:
    assert got[5:] == want[5:]
    for g, w in zip(got[:5], want[:5], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            ind.assert_same_bits(g, w)


def test_public_functions(backend: str) -> None:
    x, other = normal((7, 130), torch.bfloat16), normal((7, 130), torch.bfloat16, seed=1)
    weight, bias = normal((130,), torch.float32, seed=2), normal((130,), torch.float32, seed=3)
    activated = OPS["act_quantize"](x, other, "gelu", *PLAIN)[0]
    normed = OPS["norm_quantize"](x, other, weight, bias, 1e-3, False, *PLAIN)[0]
    for granularity in scale_layout.FUSED:
        cast = {"transpose": True, "granularity": granularity}
        q = act_quantize(x, "e4m3", other, kind="gelu", **cast)
        same_quantized(q, mixprec.quantize(activated, "e4m3", **cast))
        q, total = norm_quantize(x, "e5m2", weight, bias, eps=1e-3, residual=other, **cast)
        same_quantized(q, mixprec.quantize(normed, "e5m2", **cast))
        ind.assert_same_bits(total, (x.float() + other.float()).bfloat16())
    y = OPS["act_quantize"](x, None, "silu", *PLAIN)[0]
    ind.assert_same_bits(act_quantize(x, "bf16", scale=2.0).data, (y * 2).bfloat16())
    y = OPS["norm_quantize"](x, None, None, None, 1e-5, True, *PLAIN)[0]
    q, total = norm_quantize(x, "bf16", subtract_mean=True, scale=2.0)
    assert total is x
    ind.assert_same_bits(q.data, (y * 2).bfloat16())


@for_each("subtract_mean", [True, False])
def test_special_values(backend: str, subtract_mean: bool) -> None:
    """NaN and Inf make their row NaN, and no other; a constant row is 0 (LayerNorm) or finite."""
    x = normal((6, 300), torch.float32)
    x[1, 299], x[3, 0], x[4] = math.inf, math.nan, 0.0
    data, _, scale_inv, _, amax, *_ = norm_quantize_op(
        x, None, None, None, 1e-5, subtract_mean, torch.float8_e4m3fn, None, False, "row", True
    )
    bad = torch.tensor([False, True, False, True, False, False])
    assert torch.equal(data.float().isnan().any(1), bad)
    assert (data[4].float() == 0).all()
    assert scale_inv[[1, 3, 4], 0].tolist() == [1.0] * 3
    assert amax.isnan()


def wide(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation in FP64, from torch's functions of x that is not near their limits."""
    x = x.double()
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x.relu() ** 2


# The largest error in units in the last place, on [-8, 8]: exp(54) has that of 54 in gelu_tanh(-8).
@for_each("kind, units", [("silu", 2), ("gelu", 6), ("gelu_tanh", 110), ("relu2", 0.5)])
def test_activations(backend: str, kind: str, units: float) -> None:
    for bound in (0.01, 1.0, 8.0):
        x = torch.linspace(-bound, bound, 40_001)
        want = wide(x, kind)
        y = OPS["act_quantize"](x, None, kind, *PLAIN)[0]
        unit = torch.nextafter(want.float().abs(), torch.tensor(math.inf)) - want.float().abs()
        assert ((y - want).abs() <= units * unit.double()).all(), bound


@for_each("kind, error", [("silu", 1e-6), ("gelu", 2e-7), ("gelu_tanh", 2e-6), ("relu2", 0.0)])
def test_derivatives(backend: str, kind: str, error: float) -> None:
    x = torch.cat([torch.linspace(-30, 30, 40_001), normal((1000,), torch.float32)])
    exact = x.double().requires_grad_()
    wide(exact, kind).sum().backward()
    assert exact.grad is not None
    dx, *_ = OPS["act_backward"](torch.ones_like(x), x, None, kind, *PLAIN)
    assert (dx - exact.grad).abs().max() <= error


@for_each("kind", KINDS)
def test_limits(backend: str, kind: str) -> None:
    """Finite values give finite values as long as FP32 holds them; NaN and +Inf stay non-finite."""
    large = torch.tensor([1e-38, 20.0, 90.0, 200.0, 1e15, 1e18, -20.0, -90.0, -1e4, -1e18, -3e38])
    y = OPS["act_quantize"](large, None, kind, *PLAIN)[0]
    dx, *_ = OPS["act_backward"](torch.ones_like(large), large, None, kind, *PLAIN)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert torch.equal(y[1:6], large[1:6] ** (2 if kind == "relu2" else 1))
    assert (y[6:].abs() < 1e-7).all()
    assert (dx[6:].abs() < 1e-6).all()
    y = OPS["act_quantize"](torch.tensor([math.inf, math.nan]), None, kind, *PLAIN)[0]
    assert y[0] == math.inf
    assert y[1].isnan()
    assert OPS["act_quantize"](torch.tensor([-0.0, 0.0]), None, kind, *PLAIN)[0].tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("op", ["quantize", "act_quantize", "norm_quantize", "act_backward"])
def test_an_amax_is_recorded(op: str, backend: str) -> None:
    run, x, w = OPS[op].handle(backend), torch.randn(64, 48) * 3, torch.rand(48)
    scales = None, torch.tensor(0.0), torch.tensor(2.0)
    for (i, scale), bad in itertools.product(enumerate(scales), (None, math.nan, math.inf)):
        y = x.clone()
        y[3, 5] = x[3, 5] if bad is None else bad
        first = {"norm_quantize": (y, None, w, None, 1e-5, True), "quantize": (y,)}
        more = (y, None, "gelu") if op == "act_quantize" else (y, x, x, "silu")
        cast = torch.float8_e4m3fn, scale, i != 1, "tensor", True
        expected = run(*first.get(op, more), *cast)
        for before in (-1.0, 1e3, math.nan):
            record = torch.tensor(before)
            got = run(*first.get(op, more), *cast, record)
            assert got[4].shape == (0,)
            largest = torch.maximum(torch.tensor(before), expected[4])
            torch.testing.assert_close(record, largest, rtol=0, atol=0, equal_nan=True)
            for i in {*range(len(got))} - {4}:
                ind.assert_same_bits(got[i], expected[i])


def test_an_amax_is_recorded_for_a_tensor_only() -> None:
    record, cast = torch.tensor(-1.0), (torch.float8_e4m3fn, None, False)
    with pytest.raises(ValueError, match=r"^quantize: record must be None with granularity 'row'"):
        OPS["quantize"](torch.randn(4, 8), *cast, "row", True, record)
    with pytest.raises(ValueError, match=r"^quantize: record must hold one float32, got shape"):
        OPS["quantize"](torch.randn(4, 8), *cast, "tensor", True, torch.zeros(2))
    OPS["quantize"](torch.ones(4, 8), *cast, "tensor", True, record)
    assert (record.item(), record._version) == (1.0, 1)
