"""norm_quantize and norm_backward: the sums' order, the norms, and that the cast is quantize's."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import LAYOUTS, WIDE, Layout, for_each, normal, pairwise
from test_act_quantize import CASTS, PLAIN, same, same_quantized

import mixprec
from mixprec.ops import norm_quantize
from mixprec.ops._dispatch.casts import Cast
from mixprec.ops._reference import scale_layout
from mixprec.ops.norm_quantize import (
    norm_backward_op,
    norm_backward_reference,
    norm_quantize_op,
    norm_quantize_reference,
)
from mixprec.ops.quantize import quantize_reference

F32 = np.float32
SHAPES = ((0,), (0, 5), (5, 0), (4, 0, 3), (1,), (7,), (257,), (13, 17), (63, 65), (65, 256))
SHAPES += ((130, 1), (3, 1031), (2, 3, 513), (129, 129))
Given = tuple[torch.Tensor | None, ...]


def row_sum(x: np.ndarray) -> F32:
    """The sum of a row in the defined order, one FP32 addition after the other."""
    partial = [F32(0)] * 256
    for i, value in enumerate(x):
        partial[i % 256] = partial[i % 256] + value
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [a + b for a, b in zip(partial[:half], partial[half:], strict=True)]
    return partial[0]


def column_sums(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1], F32)
    for band in range(0, len(x), 64):
        of_band = np.zeros(x.shape[1], F32)
        for row in x[band : band + 64]:
            of_band = of_band + row
        total = total + of_band
    return total


def vectors(k: int, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """weight and bias or not, of any dtype."""
    weight = normal((k,), WIDE[i % 3], seed=90) if i % 4 else None
    return weight, normal((k,), WIDE[(i + 1) % 3], seed=91) if i % 3 else None


@for_each("subtract_mean, k", [(mean, k) for mean in (True, False) for k in (1, 255, 256, 700)])
def test_operation_by_operation(backend: str, subtract_mean: bool, k: int) -> None:
    """Against NumPy, bit for bit."""
    x, g, g_total = (normal((70, k), torch.float32, seed=i) + (i == 0) for i in range(3))
    weight, bias = normal((k,), torch.float32, seed=4), normal((k,), torch.float32, seed=5)
    y, *_, mean, rstd = norm_quantize_op(x, None, weight, bias, 1e-5, subtract_mean, *PLAIN)
    rows, w, b, of_y = (t.numpy() for t in (x, weight, bias, g))
    want, dx = np.empty_like(rows), np.empty_like(rows)
    products = np.empty_like(rows)
    for i, row in enumerate(rows):
        average = row_sum(row) / F32(k) if subtract_mean else F32(0)
        centred = row - average
        variance = row_sum(centred * centred) / F32(k)
        r = F32(1) / np.sqrt(variance + F32(1e-5))
        assert rstd[i].item() == r
        assert not subtract_mean or mean[i].item() == average
        xhat = centred * r
        want[i] = xhat * w + b
        gw = of_y[i] * w
        c1 = row_sum(gw * xhat) / F32(k)
        c2 = row_sum(gw) / F32(k) if subtract_mean else F32(0)
        dx[i] = ((gw - c2) - xhat * c1) * r + g_total.numpy()[i]
        products[i] = of_y[i] * xhat
    ind.assert_bits(y, want.view(np.uint32))
    got = norm_backward_op(g, x, weight, mean, rstd, g_total, True)
    for name, have, need in zip(
        ("dx", "dweight", "dbias"), got, (dx, column_sums(products), column_sums(of_y)), strict=True
    ):
        ind.assert_bits(have, need.view(np.uint32), name)


@for_each("subtract_mean", [True, False])
def test_against_torch_in_fp64(backend: str, subtract_mean: bool) -> None:
    x, g, res, of_total = (normal((33, 300), torch.float32, seed=i) for i in range(4))
    weight, bias = normal((300,), torch.float32, seed=5), normal((300,), torch.float32, seed=6)
    y, *_, total, mean, rstd = norm_quantize_op(x, res, weight, bias, 1e-3, subtract_mean, *PLAIN)
    leaves = [t.double().requires_grad_() for t in (total, weight, bias)]
    if subtract_mean:
        want = torch.nn.functional.layer_norm(leaves[0], (300,), *leaves[1:], 1e-3)
    else:
        want = torch.nn.functional.rms_norm(leaves[0], (300,), leaves[1], 1e-3) + leaves[2]
    ((want * g).sum() + (leaves[0] * of_total).sum()).backward()
    torch.testing.assert_close(total, x + res, rtol=0, atol=0)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=2e-6)
    got = norm_backward_op(g, total, weight, mean, rstd, of_total, True)
    for have, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(have.double(), leaf.grad, rtol=2e-6, atol=2e-5)


@for_each("layout, cast, dtype, subtract_mean", pairwise(LAYOUTS, CASTS, WIDE, (True, False)))
def test_casts_shapes_and_layouts(
    poisoned: None, layout: Layout, cast: Cast, dtype: torch.dtype, subtract_mean: bool
) -> None:
    """The casts of the values are those of quantize, and the kernels are the references."""
    for i, shape in enumerate(SHAPES):
        of_shape = cast._replace(transpose=cast.transpose and len(shape) >= 2)
        x, res = layout(normal(shape, dtype, seed=i)), layout(normal(shape, dtype, seed=i + 1))
        given = x, res if i % 2 else None, *vectors(shape[-1], i), 1e-5, subtract_mean
        got = norm_quantize_op(*given, *of_shape)
        same(got[:5], quantize_reference(norm_quantize_op(*given, *PLAIN)[0], of_shape))
        same(got, norm_quantize_reference(*given, of_shape), str(shape))


@for_each("layout, dtype, g_dtype, subtract_mean", pairwise(LAYOUTS, WIDE, WIDE, (True, False)))
def test_backward_shapes_and_layouts(
    poisoned: None, layout: Layout, dtype: torch.dtype, g_dtype: torch.dtype, subtract_mean: bool
) -> None:
    for i, shape in enumerate(SHAPES):
        x, g = layout(normal(shape, dtype, seed=i)), layout(normal(shape, g_dtype, seed=i + 1))
        weight, bias = vectors(shape[-1], i)
        mean, rstd = norm_quantize_op(x, None, None, None, 1e-5, subtract_mean, *PLAIN)[6:]
        g_total = layout(normal(shape, WIDE[i % 3], seed=i + 2)) if i % 2 else None
        given = g, x, weight, mean, rstd, g_total, bias is not None
        same(norm_backward_op(*given), norm_backward_reference(given), str(shape))


@for_each("cast", CASTS)
def test_large(poisoned: None, two_threads: None, cast: Cast) -> None:
    x, res, g = (normal((193, 1031), torch.bfloat16, seed=i) for i in range(3))
    x[100, 7], g[192, 1030] = 600.0, math.nan
    given = x, res, *vectors(1031, 5), 1e-6, cast[2]
    *got, total, mean, rstd = norm_quantize_op(*given, *cast)
    same((*got, total, mean, rstd), norm_quantize_reference(*given, cast))
    given = g, total, given[2], mean, rstd, res, True
    same(norm_backward_op(*given), norm_backward_reference(given))


@for_each("subtract_mean", [True, False])
def test_values_that_are_computed_twice(two_threads: None, subtract_mean: bool) -> None:
    """So many elements that they are not kept while the amax is searched for."""
    x, res = (
        normal((1 << 11,), torch.bfloat16, seed=i).repeat(2049).view(2049, -1) for i in (0, 1)
    )
    res[2048, 2047] = 700.0
    cast = Cast(torch.float8_e4m3fn, transpose=True)
    given = x, res, *vectors(2048, 5), 1e-6, subtract_mean
    same(norm_quantize_op(*given, *cast), norm_quantize_reference(*given, cast))


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
    large = torch.full((2, 5), 3e38)  # its sum and its squares overflow
    y = norm_quantize_op(large, None, None, None, 1e-5, subtract_mean, *PLAIN)[0]
    assert y.isnan().all()


def test_public_function(backend: str) -> None:
    x, res = normal((7, 130), torch.bfloat16), normal((7, 130), torch.bfloat16, seed=1)
    weight, bias = normal((130,), torch.float32, seed=2), normal((130,), torch.float32, seed=3)
    for granularity in scale_layout.FUSED:
        q, total = norm_quantize(
            x, "e5m2", weight, bias, eps=1e-3, residual=res, transpose=True, granularity=granularity
        )
        ind.assert_same_bits(total, (x.float() + res.float()).bfloat16())
        y = norm_quantize_op(x, res, weight, bias, 1e-3, False, *PLAIN)[0]
        want = mixprec.quantize(y, "e5m2", transpose=True, granularity=granularity)
        same_quantized(q, want)
    q, total = norm_quantize(x, "bf16", subtract_mean=True, scale=2.0)
    assert total is x
    y = norm_quantize_op(x, None, None, None, 1e-5, True, *PLAIN)[0]
    ind.assert_same_bits(q.data, (y * 2).bfloat16())
