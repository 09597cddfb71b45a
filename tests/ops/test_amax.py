"""amax = max |x| in FP32; NaN beats Inf beats numbers; 0 for nothing."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import LARGE, LAYOUTS, SHAPES, WIDE, Layout, for_each, from_bits, normal, pairwise

import mixprec


def check(x: torch.Tensor) -> None:
    before = ind.bits(x).copy()
    got = mixprec.amax(x)
    assert (got.dtype, got.shape, got.device) == (torch.float32, (), x.device)
    ind.assert_bits(got, ind.narrow(np.array(ind.amax(x)), torch.float32), "amax")
    assert np.array_equal(ind.bits(x), before), "amax wrote to its input"


@for_each("layout, dtype", pairwise(LAYOUTS, WIDE))
def test_shapes_and_layouts(backend: str, dtype: torch.dtype, layout: Layout) -> None:
    for i, shape in enumerate(SHAPES):
        check(layout(normal(shape, dtype, seed=i)))


@for_each("shape", LARGE)
@for_each("dtype", WIDE)
def test_large(two_threads: None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(shape, dtype)
    flat = x.view(-1)
    for i in (0, 1, flat.numel() // 2, flat.numel() - 2, flat.numel() - 1):
        before = flat[i].clone()
        for value in (-100.0, math.inf, -math.inf, math.nan):  # each the largest magnitude
            flat[i] = value
            check(x)
            check(x.t() if x.dim() == 2 else x[i % 2 :])
        flat[i] = before
    flat[0], flat[-1] = math.nan, math.inf
    check(x)


@for_each("dtype", WIDE)
def test_every_16_bit_magnitude(backend: str, dtype: torch.dtype) -> None:
    """Each code alone, NaN payloads, subnormals and both zeros included."""
    if dtype == torch.float32:
        pattern = (np.arange(1 << 16, dtype=np.uint32) << 16) + 12345
    else:
        pattern = np.arange(1 << 16, dtype=np.uint16)
    codes = from_bits(pattern, dtype)
    want = np.abs(ind.values(codes))
    for i in range(0, 1 << 16, 97 if backend == "reference" else 13):
        got = mixprec.amax(codes[i : i + 1]).item()
        assert got == want[i] or (math.isnan(got) and math.isnan(want[i])), hex(int(pattern[i]))
    check(codes[want < math.inf])
    check(codes[want <= math.inf])
    check(codes)
