"""dequantize = data * scale_inv in FP32, one rounding: the decode of every code is exact."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import (
    FP8,
    LARGE,
    LAYOUTS,
    SHAPES,
    WIDE,
    Layout,
    for_each,
    from_bits,
    name,
    normal,
    pairwise,
    random_bits,
)

import mixprec
from mixprec import Quantized

LOW = (*FP8, torch.float16, torch.bfloat16)
SCALE_INVS = (1.0, 2.0**-7, 3.0, 0.1, 2.0**-126, 2.0**126, 1.0 / 448)


def wrap(data: torch.Tensor, scale_inv: float = 1.0) -> Quantized:
    fmt = mixprec.formats.parse(data.dtype)
    inv = torch.tensor(scale_inv)
    return Quantized(data, inv, torch.tensor(1.0), None, None, fmt, "tensor")


def expected(data: torch.Tensor, scale_inv: float, dtype: torch.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        product = ind.values(data).astype(np.float32) * np.float32(scale_inv)
    return ind.narrow(product, dtype)


@for_each("scale_inv, spec, dtype", pairwise(SCALE_INVS, ind.SPECS, WIDE))
def test_every_code_is_rounded_once(
    backend: str, poisoned: None, spec: ind.Spec, dtype: torch.dtype, scale_inv: float
) -> None:
    codes = from_bits(np.arange(1 << spec.bits, dtype=spec.code_type), spec.dtype)
    got = mixprec.dequantize(wrap(codes, scale_inv), dtype)
    ind.assert_bits(got, expected(codes, scale_inv, dtype))
    exact = ind.narrow(ind.decode_table(spec), torch.float32)
    ind.assert_bits(mixprec.dequantize(wrap(codes)), exact)


@for_each("layout", LAYOUTS)
@for_each("low", LOW)
def test_shapes_and_layouts(backend: str, poisoned: None, low: torch.dtype, layout: Layout) -> None:
    for i, shape in enumerate(SHAPES):
        data = layout(normal(shape, low, seed=i))
        dtype = WIDE[i % 3]
        got = mixprec.dequantize(wrap(data, 0.375), dtype)
        assert got.is_contiguous()
        assert got.dtype == dtype
        ind.assert_bits(got, expected(data, 0.375, dtype), f"{shape} {dtype}")
        q = wrap(data)._replace(scale_inv=torch.tensor([0.375]))
        ind.assert_same_bits(mixprec.dequantize(q, dtype), got, "a scale of shape [1]")


@for_each("low", LOW)
def test_large(poisoned: None, two_threads: None, low: torch.dtype) -> None:
    for shape in LARGE:
        data = random_bits(int(np.prod(shape)), low).view(shape)
        data = data.t() if data.dim() == 2 else data[1:]
        got = mixprec.dequantize(wrap(data, 3.0), torch.bfloat16)
        ind.assert_bits(got, expected(data, 3.0, torch.bfloat16), name(shape))


def element_scales(scale_inv: torch.Tensor, m: int, k: int) -> np.ndarray:
    """The scale of each element (i, j): its row's or its block's."""
    s = ind.values(scale_inv)
    rows = [i if s.shape[0] == m else i // 128 for i in range(m)]
    cols = [j // 128 if s.shape[1] > 1 else 0 for j in range(k)]
    return s[np.ix_(rows, cols)].astype(np.float32)


def expected_by_blocks(data: torch.Tensor, scale_inv: torch.Tensor) -> np.ndarray:
    m, k = math.prod(data.shape[:-1]), data.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        wide = ind.values(data).astype(np.float32).reshape(m, k)
        return (wide * element_scales(scale_inv, m, k)).reshape(tuple(data.shape))


BY_BLOCKS = [
    ((0, 5), [(0, 1)]),
    ((5, 0), [(5, 1), (5, 0), (1, 0)]),
    ((300,), [(1, 3)]),
    ((7, 5), [(7, 1)]),
    ((1, 257), [(1, 3)]),
    ((129, 127), [(129, 1)]),
    ((130, 257), [(130, 1), (130, 3), (2, 3)]),
    ((2, 3, 43, 129), [(258, 1), (258, 2), (3, 2)]),
]


@for_each("layout", LAYOUTS)
@for_each("low", LOW)
def test_a_scale_per_row_or_block(
    backend: str, poisoned: None, low: torch.dtype, layout: Layout
) -> None:
    for i, (shape, scale_shapes) in enumerate(BY_BLOCKS):
        data = layout(normal(shape, low, seed=i))
        dtype = WIDE[i % 3]
        for scale_shape in scale_shapes:
            scale_inv = layout(normal(scale_shape, torch.float32, seed=i).abs() + 0.1)
            got = mixprec.dequantize(wrap(data)._replace(scale_inv=scale_inv), dtype)
            assert got.is_contiguous()
            want = ind.narrow(expected_by_blocks(data, scale_inv), dtype)
            ind.assert_bits(got, want, f"{shape}, scales {scale_shape}")
            if len(shape) == 2:  # what t() of it holds: a scale per column
                q = wrap(data.t())._replace(scale_inv=scale_inv.t())
                ind.assert_bits(mixprec.dequantize(q, dtype), want.T, f"{shape}, turned")
