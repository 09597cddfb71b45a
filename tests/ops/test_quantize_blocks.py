"""quantize with a scale per row or block: each block alone, bit for bit, against a loop over them.

The check knows nothing of the op: it cuts x into blocks in Python and computes amax, scale and
codes of each by the rules in `independent`.
"""

from __future__ import annotations

import math
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, contiguous, for_each, normal, random_bits, transposed

import mixprec
from mixprec import Quantized

BLOCKS = ("row", "block1x128", "block128x128")
FP8 = (ind.E4M3, ind.E5M2)
# Empties first; a vector; one less, one more than a block in each dimension; more than 2-D.
SHAPES = ((0,), (0, 5), (5, 0), (4, 0, 3), (), (1,), (129,), (1, 1), (1, 257), (257, 1))
SHAPES += ((127, 129), (128, 128), (130, 257), (2, 3, 5, 67))


def matrix(x: torch.Tensor) -> torch.Tensor:
    """x as [M, K]; a vector is one row."""
    cols = x.shape[-1] if x.dim() else 1
    return contiguous(x).view(math.prod(x.shape[:-1]), cols)


def side_lengths(x: torch.Tensor, granularity: str) -> tuple[int, int]:
    rows = 128 if granularity == "block128x128" else 1
    return rows, max(x.shape[1], 1) if granularity == "row" else 128


def block_by_block(
    x: torch.Tensor, spec: ind.Spec, granularity: str, power_of_two: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of x [M, K] and its inverse scales, one block after the other."""
    (m, k), (height, width) = x.shape, side_lengths(x, granularity)
    across = 1 if granularity == "row" else math.ceil(k / width)
    codes = np.zeros((m, k), spec.code_type)
    scale_inv = np.zeros((math.ceil(m / height), across), np.float32)
    for i in range(scale_inv.shape[0]):
        for j in range(across):
            rows = slice(i * height, (i + 1) * height)
            cols = slice(j * width, (j + 1) * width)
            block = x[rows, cols]
            scale = ind.scale_of(ind.amax(block), spec.max, power_of_two=power_of_two)
            codes[rows, cols] = ind.cast(block, scale, spec)
            scale_inv[i, j] = np.float32(1) / np.float32(scale)
    return codes, scale_inv


def assert_codes(data: torch.Tensor, scale_inv: torch.Tensor, x: torch.Tensor, *how: Any) -> None:
    """Both packed, and bit for bit those of x [M, K]."""
    codes, scales = block_by_block(x, *how)
    ind.assert_bits(data, codes.reshape(tuple(data.shape)), f"data of {tuple(x.shape)}")
    ind.assert_bits(scale_inv, scales.view(np.uint32), f"scale_inv of {tuple(x.shape)}")
    assert scale_inv.dtype == torch.float32
    for t in (data, scale_inv):
        assert t.stride() == torch.empty(t.shape).stride()


def check(
    q: Quantized, x: torch.Tensor, spec: ind.Spec, granularity: str, transpose: bool, two: bool
) -> None:
    """Every field of q against the definition, bit for bit."""
    rows, how = matrix(x), (spec, granularity, two)
    assert (q.fmt.name, q.granularity, q.data.dtype) == (spec.name, granularity, spec.dtype)
    assert q.data.shape == x.shape
    assert_codes(q.data, q.scale_inv, rows, *how)
    ind.assert_bits(q.amax, ind.narrow(np.array(ind.amax(x)), torch.float32), "amax")
    assert (q.data_t is None, q.scale_inv_t is None) == (not transpose,) * 2
    if transpose:
        assert_codes(q.data_t, q.scale_inv_t, rows.t(), *how)
        assert q.data_t.shape == rows.t().shape
        ind.assert_same_bits(q.transposed().data, q.data_t)


@for_each("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", BLOCKS)
def test_shapes_and_layouts(backend: str, poisoned: None, granularity: str, layout: Layout) -> None:
    at = LAYOUTS.index(layout)
    for i, shape in enumerate(SHAPES):
        if math.prod(shape) > 10_000 and i % 3 != at % 3:
            continue  # slow to check: a third of the layouts
        dtype, spec, transpose = WIDE[(i + at) % 3], FP8[i % 2], len(shape) >= 2 and i % 4 != 3
        x = layout(normal(shape, dtype, seed=i))
        before = ind.bits(x)
        settings = {"granularity": granularity, "power_of_two_scale": (i + at) % 2 == 0}
        q = mixprec.quantize(x, spec.dtype, transpose=transpose, **settings)
        two = settings["power_of_two_scale"]
        check(q, x, spec, granularity, transpose, two)
        assert np.array_equal(ind.bits(x), before), "quantize wrote to its input"


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """[131, 390] of every magnitude, no two blocks alike: zeros, Inf, NaN, tiny and huge amaxes."""
    x = normal((131, 390), dtype, seed=7) * torch.logspace(-6, 4, 131).unsqueeze(1).to(dtype)
    x[3] = 0
    x[:, 256:384] = 0
    x[5, 7], x[130, 385] = math.nan, -math.inf
    x[40, :128] = torch.finfo(dtype).smallest_normal / 2  # its scale is clamped
    x[41, :128] = torch.finfo(dtype).max
    x[42, 128] = -torch.finfo(dtype).tiny
    x[43, 128:256] = -0.0
    return x


AWKWARD = [
    (torch.float32, ind.E4M3, True),
    (torch.float32, ind.E5M2, False),
    (torch.bfloat16, ind.E5M2, True),
    (torch.float16, ind.E4M3, False),
    (torch.float16, ind.E5M2, True),
]


@for_each("dtype, spec, two", AWKWARD)
@pytest.mark.parametrize("granularity", BLOCKS)
def test_awkward_blocks(
    backend: str, poisoned: None, granularity: str, dtype: torch.dtype, spec: ind.Spec, two: bool
) -> None:
    settings = {"granularity": granularity, "power_of_two_scale": two}
    for x in (awkward(dtype), random_bits(130 * 260, dtype).view(130, 260)):
        q = mixprec.quantize(x, spec.dtype, transpose=True, **settings)
        check(q, x, spec, granularity, True, two)


@for_each("granularity", BLOCKS)
@for_each("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_block(
    backend: str, granularity: str, value: float
) -> None:
    x = normal((130, 257), torch.float32)
    clean = mixprec.quantize(x, "e4m3", transpose=True, granularity=granularity)
    x[129, 128] = value
    q = mixprec.quantize(x, "e4m3", transpose=True, granularity=granularity)
    height, width = side_lengths(x, granularity)
    changed = torch.zeros(q.scale_inv.shape, dtype=torch.bool)
    changed[129 // height, 128 // width] = True
    assert (q.scale_inv[changed] == 1).all()
    ind.assert_same_bits(q.scale_inv[~changed], clean.scale_inv[~changed])
    assert q.data[129, 128].float().isnan(), "hidden from whoever looks for overflows"
    assert q.data.float().isnan().sum() == 1
    assert q.data_t is not None
    assert q.data_t.float().isnan().sum() == 1
    assert q.amax.isnan() if math.isnan(value) else q.amax.isinf()


@pytest.mark.parametrize("granularity", BLOCKS)
def test_large(poisoned: None, two_threads: None, granularity: str) -> None:
    """The parallel paths, twice: enough tiles for all threads, large enough to be streamed."""
    x = normal((1030, 1100), torch.bfloat16)
    for y in (x, x.t(), normal((1024, 1152), torch.float32)):
        results = []
        for backend in ("cpp", "cpp", "reference"):
            with mixprec.use_backend(backend):
                q = mixprec.quantize(y, "e4m3", transpose=True, granularity=granularity)
            results.append(q[:5])
        for first, *others in zip(*results, strict=True):
            for other, what in zip(others, ("second run", "reference"), strict=True):
                ind.assert_same_bits(first, other, what)


@for_each("granularity", ["tensor", *BLOCKS])
def test_t_and_transposed(backend: str, granularity: str) -> None:
    x = normal((150, 260), torch.float32)
    wide = mixprec.dequantize(mixprec.quantize(x, "e4m3", granularity=granularity))
    for transpose in (False, True):
        q = mixprec.quantize(x, "e4m3", transpose=transpose, granularity=granularity)
        t = q.t()
        assert t.shape == (260, 150)
        ind.assert_same_bits(mixprec.dequantize(t), contiguous(wide.t()), "t() keeps the values")
        ind.assert_same_bits(t.t().data, q.data)
        ind.assert_same_bits(t.t().scale_inv, q.scale_inv)
        copied = transpose and granularity in ("tensor", "block128x128")
        assert t.data.is_contiguous() == copied
        assert t.scale_inv.data_ptr() == q.scale_inv.data_ptr(), "a view"
    other = q.transposed()
    want = mixprec.quantize(transposed(x).t(), "e4m3", granularity=granularity)
    ind.assert_same_bits(mixprec.dequantize(other), mixprec.dequantize(want))
    with pytest.raises(ValueError, match=r"^Quantized\.transposed: .*transpose=True"):
        want.transposed()
    with pytest.raises(ValueError, match=r"Quantized\.t: data must be 2-D"):
        mixprec.quantize(x[0], "e4m3", granularity=granularity).t()
