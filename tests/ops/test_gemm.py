"""gemm and gemm_accumulate_ on the CPU: the tests of test_gemm_values.py, every pair of sizes,
products of all codes, and scales that are no powers of two."""

from __future__ import annotations

import itertools
import math

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    FP8,
    LAYOUTS,
    WIDE,
    for_each,
    from_bits,
    normal,
    pairwise,
    random_bits,
    small_integers,
)
from emulated.agreement import CPU, Variant
from emulated.values.test_gemm_values import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_gemm_values import KINDS, PAIRS, Pair, check, formats, product, scaled

import mixprec
from mixprec.testing import assert_close, tolerance

SIZES = (0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100, 129, 257)


@pytest.fixture(params=["cpp", "reference"])
def variant(request: pytest.FixtureRequest, poisoned: None, two_threads: None) -> Variant:
    return Variant(request.param, CPU, most=1 << 24, quick=request.param == "cpp")


@formats
def test_every_pair_of_sizes(backend: str, poisoned: None, pair: Pair) -> None:
    """K runs along the diagonals: any two values of two of M, N and K meet, in any two layouts."""
    for i, (m, n, k) in enumerate(pairwise(SIZES, SIZES, SIZES), start=PAIRS.index(pair)):
        a, b = small_integers((m, k), pair[0], seed=i), small_integers((k, n), pair[1], seed=-i)
        a, b = LAYOUTS[i % len(LAYOUTS)](a), LAYOUTS[i // len(LAYOUTS) % len(LAYOUTS)](b)
        out_dtype, acc = WIDE[i % 3], torch.ones(m, n)
        c = mixprec.gemm(a, b, out_dtype=out_dtype)
        assert (c.dtype, c.is_contiguous()) == (out_dtype, True)
        check(c, product(a, b), f"[{m}, {k}] @ [{k}, {n}] to {out_dtype}")
        mixprec.gemm_accumulate_(acc, a, b)
        check(acc, product(a, b) + 1, f"[{m}, {k}] @ [{k}, {n}], accumulated")


@for_each("pair", PAIRS)
def test_products_of_codes(backend: str, pair: Pair) -> None:
    """K = 1: one product, one rounding; of all FP8 codes, or of 700 patterns of 16 bits. The
    processor's BF16 dot product reads zero below 2^-126; such blocks are done in FP32."""
    if pair[0] in FP8:
        a, b = (from_bits(np.arange(256, dtype=np.uint8), dtype) for dtype in pair)
    else:
        a, b = (random_bits(700, dtype, seed) for seed, dtype in enumerate(pair))
    want = product(a[:, None], b[None])
    for out_dtype in WIDE if pair[0] in FP8 else (torch.float32,):
        c = mixprec.gemm(a[:, None], b[None], out_dtype=out_dtype)
        if pair[0] == torch.bfloat16:  # sums may be flushed below FP32's normal numbers
            tiny = want.abs() < 2.0**-125
            want, c = want.masked_fill(tiny, 0.0), c.masked_fill(tiny, 0.0)
        check(c, want, str(out_dtype))


@formats
def test_scales_and_default_output(backend: str, pair: Pair) -> None:
    a, b = normal((37, 50), pair[0], 1), normal((50, 29), pair[1], 2)
    assert mixprec.gemm(a, b).dtype == (torch.bfloat16 if pair[0] in FP8 else pair[0])
    for sa, sb in ((0.1, 3.0), (0.1, None), (None, 1 / 448), (1e-20, 1e20)):
        left, right = a.double() * np.float32(sa or 1), b.double() * np.float32(sb or 1)
        for out_dtype in WIDE:
            c = mixprec.gemm(a, b, a_scale_inv=sa, b_scale_inv=sb, out_dtype=out_dtype)
            assert_close(c, left @ right, tolerance(left @ right, left, right, out_dtype))
            ta, tb = (None if s is None else torch.tensor([s]) for s in (sa, sb))
            scales = {"a_scale_inv": ta, "b_scale_inv": tb, "out_dtype": out_dtype}
            ind.assert_same_bits(mixprec.gemm(a, b, **scales, fast_accum=True), c)


MIXED = tuple(itertools.product(KINDS, KINDS))[1:]


@for_each("kinds, out_dtype", [(kinds, WIDE[i % 3]) for i, kinds in enumerate(MIXED)])
def test_scales_that_are_no_powers_of_two(
    backend: str, kinds: tuple[str, str], out_dtype: torch.dtype
) -> None:
    """Wide apart, on random and on one-signed data; Inf and NaN stay in their rows."""
    values = torch.tensor([0.1, 1.0, 3.7, 1e-3, 1 / 448])
    for i, (m, n, k) in enumerate(((70, 257, 300), (9, 33, 1100))):
        pair = PAIRS[(i + len(kinds[0])) % len(PAIRS)]
        a, b = normal((m, k), torch.float32, i), normal((n, k), torch.float32, i + 9)
        a, b = (x.abs().to(d) if i else x.to(d) for x, d in zip((a, b), pair, strict=True))
        (sa, left), (sb, right) = scaled(a, kinds[0], i, values), scaled(b, kinds[1], 5, values)
        want, scales = left @ right.t(), {"a_scale_inv": sa, "b_scale_inv": sb.t()}
        c = mixprec.gemm(a, b.t(), **scales, out_dtype=out_dtype)
        assert_close(c, want, tolerance(want, left, right.t(), out_dtype))
        acc = torch.zeros(m, n)
        mixprec.gemm_accumulate_(acc, a, b.t(), **scales)
        assert_close(acc, want, tolerance(want, left, right.t(), torch.float32))
        a[3, k - 1] = math.nan
        got = mixprec.gemm(a, b.t(), **scales)
        assert torch.equal(got.isnan().any(1), torch.arange(m) == 3)


def test_overflow_is_inf_as_ieee_says(backend: str) -> None:
    a, big = torch.tensor([[2048.0, 1.0]]).half(), torch.full((2, 2), 2.0**127).bfloat16()
    for out_dtype in WIDE:
        for target in (65504.0, 65519.0, 65520.0, -65520.0, 1e6):
            b = torch.tensor([[target // 2048.0], [target % 2048.0]]).half()
            want = torch.tensor([[target]]).double()
            check(mixprec.gemm(a, b, out_dtype=out_dtype), want, str(target))
        assert mixprec.gemm(big, big, out_dtype=out_dtype).isposinf().all()


def test_accumulate_edges(backend: str) -> None:
    nothing = torch.empty(3, 0).half(), torch.empty(0, 2).half()
    acc = torch.tensor([[math.nan, math.inf], [-0.0, 1.0], [2.0**-149, 3e38]])
    before = acc.clone()
    mixprec.gemm_accumulate_(acc, *nothing)
    ind.assert_same_bits(acc[0], before[0])
    ind.assert_same_bits(acc[1:] + 0.0, before[1:] + 0.0)
    mixprec.gemm_accumulate_(acc, torch.ones(3, 4).half(), torch.ones(4, 2).half())
    check(acc, before.double() + 4.0, "ones")
    overflowing = torch.full((1, 1), 3e38)
    mixprec.gemm_accumulate_(overflowing, *[torch.full((1, 1), 1e19).bfloat16()] * 2)
    assert overflowing.isposinf().all()


@for_each("kinds", [("row", "row"), ("block1x128", "block128x128"), ("tensor", "row")])
def test_quantized_operands_bring_their_scales(backend: str, kinds: tuple[str, str]) -> None:
    operands, values = [], []
    for rows, fmt, kind in zip((140, 150), (mixprec.E4M3, mixprec.E5M2), kinds, strict=True):
        t = small_integers((rows, 300), fmt.dtype, seed=rows)
        s, wide = scaled(t, kind, 1)
        operands.append(mixprec.Quantized(t, s, torch.zeros(()), None, None, fmt, kind))
        values.append(wide)
    (x, w), want = operands, values[0] @ values[1].t()
    got = mixprec.gemm(x, w.data.t(), b_scale_inv=w.scale_inv.t(), out_dtype=torch.float32)
    check(got, want, "a Quantized")
    check(mixprec.gemm(x, w.t(), out_dtype=torch.float32), want, "both")
    check(mixprec.gemm(w, x.t(), out_dtype=torch.float32), want.t(), "in the other order")
