"""act_quantize and act_backward: the activations. test_values.py has the casts."""

from __future__ import annotations

import math

import torch
from cases import for_each, normal
from emulated.values.test_fused import PLAIN

from mixprec.ops.act_quantize import KINDS, act_backward_op, act_quantize_op

FP32 = torch.float32


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
def test_values(backend: str, kind: str, units: float) -> None:
    for bound in (0.01, 1.0, 8.0):
        x = torch.linspace(-bound, bound, 40_001)
        want = wide(x, kind)
        y = act_quantize_op(x, None, kind, *PLAIN)[0]
        unit = torch.nextafter(want.float().abs(), torch.tensor(math.inf)) - want.float().abs()
        assert ((y - want).abs() <= units * unit.double()).all(), bound


@for_each("kind, error", [("silu", 1e-6), ("gelu", 2e-7), ("gelu_tanh", 2e-6), ("relu2", 0.0)])
def test_derivatives(backend: str, kind: str, error: float) -> None:
    x = torch.cat([torch.linspace(-30, 30, 40_001), normal((1000,), FP32)])
    exact = x.double().requires_grad_()
    wide(exact, kind).sum().backward()
    assert exact.grad is not None
    dx, *_ = act_backward_op(torch.ones_like(x), x, None, kind, *PLAIN)
    assert (dx - exact.grad).abs().max() <= error


@for_each("kind", KINDS)
def test_limits(backend: str, kind: str) -> None:
    """Finite values give finite values as long as FP32 holds them; NaN and +Inf stay non-finite."""
    large = torch.tensor([1e-38, 20.0, 90.0, 200.0, 1e15, 1e18, -20.0, -90.0, -1e4, -1e18, -3e38])
    y = act_quantize_op(large, None, kind, *PLAIN)[0]
    dx, *_ = act_backward_op(torch.ones_like(large), large, None, kind, *PLAIN)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert torch.equal(y[1:6], large[1:6] ** (2 if kind == "relu2" else 1))
    assert (y[6:].abs() < 1e-7).all()
    assert (dx[6:].abs() < 1e-6).all()
    y = act_quantize_op(torch.tensor([math.inf, math.nan]), None, kind, *PLAIN)[0]
    assert y[0] == math.inf
    assert y[1].isnan()
    assert act_quantize_op(torch.tensor([-0.0, 0.0]), None, kind, *PLAIN)[0].tolist() == [0.0, 0.0]
