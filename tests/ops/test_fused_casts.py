"""act_quantize, norm_quantize and their backward ops: the kernels are the references, and the cast
is that of quantize. test_act_quantize.py and test_norm_quantize.py have the values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import independent as ind
import torch
from cases import LAYOUTS, WIDE, Layout, contiguous, for_each, normal, pairwise

import mixprec
from mixprec.ops import act_quantize, norm_quantize
from mixprec.ops._dispatch.casts import Cast
from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference import scale_layout
from mixprec.ops.act_quantize import KINDS, act_backward_reference, act_quantize_reference
from mixprec.ops.norm_quantize import norm_backward_reference, norm_quantize_reference
from mixprec.ops.quantize import quantize_reference

PLAIN = Cast(torch.float32)  # the values themselves
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
SHAPES = ((0,), (0, 5), (5, 0), (4, 0, 3), (1,), (7,), (257,), (13, 17), (63, 65), (65, 256))
SHAPES += ((130, 1), (3, 1031), (2, 3, 513), (129, 129))


def act(i: int, x: torch.Tensor, g: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of the op without those of the cast; i varies the options."""
    return x, other if i % 2 else None, KINDS[i // 2 % 4]


def act_backward(i: int, x: torch.Tensor, g: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    return g, *act(i, x, g, other)


def norm(i: int, x: torch.Tensor, g: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    """weight and bias, or not, of any dtype."""
    weight = normal(x.shape[-1:], WIDE[i % 3], seed=90) if i % 4 else None
    bias = normal(x.shape[-1:], WIDE[(i + 1) % 3], seed=91) if i % 3 else None
    return x, other if i % 2 else None, weight, bias, 1e-5, i // 2 % 2 == 0


def norm_backward(i: int, x: torch.Tensor, g: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    _, total, weight, bias, *rule = norm(i, x, g, other)
    *_, mean, rstd = OPS["norm_quantize"](x, None, None, None, *rule, *PLAIN)
    return g, x, weight, mean, rstd, total, bias is not None


FUSED: dict[str, tuple[Any, Any]] = {
    "act_quantize": (act_quantize_reference, act),
    "act_backward": (act_backward_reference, act_backward),
    "norm_quantize": (norm_quantize_reference, norm),
    # Which casts nothing.
    "norm_backward": (lambda *given: norm_backward_reference(given), norm_backward),
}


def check(name: str, cast: Cast, i: int, *tensors: torch.Tensor) -> None:
    reference, arguments = FUSED[name]
    given, op = arguments(i, *tensors), OPS[name]
    casts = () if name == "norm_backward" else (cast,)
    got, label = op(*given, *itertools.chain(*casts)), f"{tuple(tensors[0].shape)} {i}"
    compare(got, reference(*given, *casts), label)
    if name.endswith("_quantize"):
        compare(got[:5], quantize_reference(op(*given, *PLAIN)[0], cast), f"the cast of {label}")


def compare(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], label: str) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.stride()) == (w.shape, w.stride()), f"{label}: result {i}"
        ind.assert_same_bits(g, w, f"{label}: result {i}")


@for_each("layout, cast, name, dtype", pairwise(LAYOUTS, CASTS, [*FUSED], WIDE))
def test_casts_shapes_and_layouts(
    poisoned: None, layout: Layout, cast: Cast, name: str, dtype: torch.dtype
) -> None:
    for i, shape in enumerate(SHAPES, LAYOUTS.index(layout)):
        of_shape = cast._replace(transpose=cast.transpose and len(shape) >= 2)
        x, other = (layout(normal(shape, dtype, seed=i + k)) for k in range(2))
        g = layout(normal(shape, WIDE[i % 3], seed=i + 2))
        check(name, of_shape, i, x, g, other if i % 4 == 1 else contiguous(other))


@for_each("name, i", itertools.product(FUSED, range(len(CASTS))))
def test_large(poisoned: None, two_threads: None, name: str, i: int) -> None:
    x, g, other = (normal((193, 1031), torch.bfloat16, seed=k) for k in range(3))
    # NaN where it leaves other scales alone.
    x[100, 7] = 60.0
    other[192, 1030] = math.nan if CASTS[i].granularity in ("row", "mx") else -50.0
    check(name, CASTS[i], 2 * i + 1, x, g, other)


@for_each("name, i", itertools.product(FUSED, (1, 3)))
def test_values_that_are_computed_twice(two_threads: None, name: str, i: int) -> None:
    """So many elements that they are not kept while the amax is searched for."""
    row = (normal((1 << 11,), torch.bfloat16, seed=k) for k in range(3))
    x, g, other = (t.repeat(2049).view(2049, -1) for t in row)
    x[2048, 2047], other[2048, 2047] = 11.0, 700.0
    check(name, Cast(torch.float8_e4m3fn, transpose=True), i, x, g, other)


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
