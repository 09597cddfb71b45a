"""act_quantize and act_backward: the activations, and that the cast is that of quantize."""

from __future__ import annotations

import itertools
import math

import independent as ind
import torch
from cases import LAYOUTS, SHAPES, WIDE, Layout, for_each, normal, pairwise, random_bits

import mixprec
from mixprec.ops import act_quantize
from mixprec.ops._dispatch.casts import Cast
from mixprec.ops._reference import scale_layout
from mixprec.ops.act_quantize import (
    KINDS,
    act_backward_op,
    act_backward_reference,
    act_quantize_op,
    act_quantize_reference,
)
from mixprec.ops.quantize import quantize_reference

FP32 = torch.float32
PLAIN = Cast(FP32)  # the values themselves
CASTS = [
    PLAIN,
    Cast(torch.bfloat16),
    Cast(torch.float16, torch.tensor(3.0), True, "tensor", True),
    Cast(torch.float8_e4m3fn, None, True, "tensor", False),
    Cast(torch.float8_e4m3fn, torch.tensor(0.0), False, "tensor", True),
    Cast(torch.float8_e5m2, torch.tensor(37.0), True, "tensor", True),
    *(
        Cast(fp8, None, transpose, granularity, True)
        for fp8, (transpose, granularity) in zip(
            itertools.cycle((torch.float8_e4m3fn, torch.float8_e5m2)),
            itertools.product((False, True), ("row", "block1x128", "block128x128", "mx", "mx")),
        )
    ),
]


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str = "") -> None:
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.stride()) == (w.shape, w.stride()), f"{what} result {i}"
        ind.assert_same_bits(g, w, f"{what} result {i}")


def same_quantized(got: mixprec.Quantized, want: mixprec.Quantized) -> None:
    assert got[5:] == want[5:]
    for g, w in zip(got[:5], want[:5], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            ind.assert_same_bits(g, w)


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


@for_each("kind, dtype, gate", [*itertools.product(KINDS, WIDE, (False, True))])
def test_every_bit_pattern(kind: str, dtype: torch.dtype, gate: bool) -> None:
    x = random_bits(1 << 16, dtype).view(64, 1024)
    up = random_bits(1 << 16, dtype, seed=1).view(64, 1024) if gate else None
    g = random_bits(1 << 16, dtype, seed=2).view(64, 1024)
    same(act_quantize_op(x, up, kind, *PLAIN), act_quantize_reference(x, up, kind, PLAIN))
    same(act_backward_op(g, x, up, kind, *PLAIN), act_backward_reference(g, x, up, kind, PLAIN))


@for_each("layout, cast, kind, dtype", pairwise(LAYOUTS, CASTS, KINDS, WIDE))
def test_casts_shapes_and_layouts(
    poisoned: None, layout: Layout, cast: Cast, kind: str, dtype: torch.dtype
) -> None:
    """The casts of the values are those of quantize, and the kernels are the references."""
    for i, shape in enumerate(SHAPES):
        of_shape = cast._replace(transpose=cast.transpose and len(shape) >= 2)
        x, up = layout(normal(shape, dtype, seed=i)), normal(shape, dtype, seed=i + 1)
        other = up if (i + len(kind)) % 2 else None
        got = act_quantize_op(x, other, kind, *of_shape)
        same(got, quantize_reference(act_quantize_op(x, other, kind, *PLAIN)[0], of_shape))
        same(got, act_quantize_reference(x, other, kind, of_shape), str(shape))
        g = layout(normal(shape, WIDE[i % 3], seed=i + 2))
        want = act_backward_reference(g, x, other, kind, of_shape)
        same(act_backward_op(g, x, other, kind, *of_shape), want, str(shape))


@for_each("cast", CASTS)
def test_large(poisoned: None, two_threads: None, cast: Cast) -> None:
    x, up, g = (normal((193, 1031), torch.bfloat16, seed=i) for i in range(3))
    x[100, 7], up[192, 1030] = 60.0, math.nan if cast.granularity in ("row", "mx") else -50.0
    same(act_quantize_op(x, up, "silu", *cast), act_quantize_reference(x, up, "silu", cast))
    same(act_backward_op(g, x, up, "silu", *cast), act_backward_reference(g, x, up, "silu", cast))


def test_values_that_are_computed_twice(two_threads: None) -> None:
    """So many elements that they are not kept while the amax is searched for."""
    x = normal((1 << 11,), torch.bfloat16).repeat(2049).view(2049, -1)
    x[2048, 2047] = 11.0
    cast = Cast(torch.float8_e4m3fn, transpose=True)
    same(act_quantize_op(x, None, "relu2", *cast), act_quantize_reference(x, None, "relu2", cast))
    same(act_backward_op(x, x, x, "relu2", *cast), act_backward_reference(x, x, x, "relu2", cast))


def test_public_function(backend: str) -> None:
    x, up = normal((7, 130), torch.bfloat16), normal((7, 130), torch.bfloat16, seed=1)
    for granularity in scale_layout.FUSED:
        q = act_quantize(x, "e4m3", up, kind="gelu", transpose=True, granularity=granularity)
        y = act_quantize_op(x, up, "gelu", *PLAIN)[0]
        want = mixprec.quantize(y, "e4m3", transpose=True, granularity=granularity)
        same_quantized(q, want)
    q = act_quantize(x, "bf16", scale=2.0)
    ind.assert_same_bits(q.data, (act_quantize_op(x, None, "silu", *PLAIN)[0] * 2).bfloat16())
