"""Block formats in quantize, dequantize, gemm and gemm_accumulate_; test_values.py has
the values."""

from __future__ import annotations

import pytest
import torch
from cases import for_each, normal, pairwise
from independent import assert_same_bits

import mixprec
from mixprec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from mixprec.testing import assert_close, tolerance

FORMATS = (*((fmt, "mx") for fmt in (E4M3, E5M2, E3M2, E2M3, E2M1)), (E2M1, "nvfp4"))
M, K, N = 9, 37, 21  # an odd number of half bytes; one block of 32 or two of 16, and a rest


def cast(
    shape: tuple[int, ...], fmt: Format | str, granularity: str, seed: int = 0, **options: object
) -> mixprec.Quantized:
    x = normal(shape, torch.float32, seed=seed)
    return mixprec.quantize(x, fmt, granularity=granularity, **options)


@for_each("fmt, granularity", FORMATS)
def test_shapes_and_views(fmt: Format, granularity: str) -> None:
    q = cast((3, 5, K), fmt, granularity, transpose=True)
    size = 16 if granularity == "nvfp4" else 32
    assert q.data.shape == (3, 5, (K + 1) // 2 if fmt == E2M1 else K)
    assert (q.shape, q.columns) == ((3, 5, K), K)
    assert q.scale_inv.shape == (15, -(-K // size))
    assert (q.tensor_scale_inv is None) == (granularity == "mx")
    wide = mixprec.dequantize(q)
    assert wide.shape == (3, 5, K)
    transposed = q.transposed()
    assert transposed.shape == (K, 15)
    x_t = normal((3, 5, K), torch.float32).flatten(0, 1).t()
    want = mixprec.quantize(x_t, fmt, granularity=granularity)
    assert_same_bits(mixprec.dequantize(transposed), mixprec.dequantize(want))
    rows = cast((15, K), fmt, granularity)
    turned = rows.t()
    assert turned.shape == (K, 15)
    assert turned.data.data_ptr() == rows.data.data_ptr(), "a view"
    assert_same_bits(mixprec.dequantize(turned), mixprec.dequantize(rows).t().contiguous())
    assert turned.t().shape == (15, K)
    assert_same_bits(mixprec.dequantize(turned.t()), mixprec.dequantize(rows))
    with pytest.raises(ValueError, match=r"data_t must be there: quantize\(transpose=True\)"):
        turned.transposed()


@for_each("a_fmt, b_fmt", pairwise(FORMATS, FORMATS))
def test_products_of_two_block_formats(
    a_fmt: tuple[Format, str], b_fmt: tuple[Format, str]
) -> None:
    a, b = cast((M, K), *a_fmt), cast((N, K), *b_fmt, seed=1)
    bias = normal((N,), torch.float32, seed=2)
    wide, wide_t = mixprec.dequantize(a).double(), mixprec.dequantize(b).double().t()
    exact = wide @ wide_t
    y = mixprec.gemm(a, b.t(), bias=bias, out_dtype=torch.float32)
    bound = tolerance(exact, wide, wide_t, torch.float32)
    assert_close(y, exact + bias, bound + 2.0**-22 * bias.abs())
    assert mixprec.gemm(a, b.t()).dtype == torch.bfloat16
    acc = torch.full((M, N), 2.0)
    mixprec.gemm_accumulate_(acc, a, b.t())
    assert_close(acc, exact + 2, bound + 2.0**-21)
    # In any position, along any dimension.
    assert_close(mixprec.gemm(b, a.t(), out_dtype=torch.float32), exact.t(), bound.t())
    c = cast((K, N), *b_fmt, seed=3)
    assert_close(
        mixprec.gemm(a, c, out_dtype=torch.float32),
        wide @ mixprec.dequantize(c).double(),
        2 * bound.max(),
    )


@for_each("fmt", FORMATS)
def test_products_with_plain_bf16(fmt: tuple[Format, str]) -> None:
    a, b = normal((M, K), torch.bfloat16), cast((N, K), *fmt)
    wide = mixprec.dequantize(b).double().t()
    bound = tolerance(a.double() @ wide, a.double(), wide, torch.float32)
    y = mixprec.gemm(a, b.t(), out_dtype=torch.float32, a_scale_inv=2.0)
    assert_close(y, 2 * (a.double() @ wide), 2 * bound)
    with torch.autocast("cpu", torch.bfloat16):  # casts the plain operand, not the other one
        assert_same_bits(mixprec.gemm(a.float(), b.t(), out_dtype=torch.float32) * 2, y)
