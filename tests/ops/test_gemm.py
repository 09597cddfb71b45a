"""gemm and gemm_accumulate_: exact where sums are exact, within the derived bound elsewhere."""

from __future__ import annotations

import itertools
import math

import independent as ind
import numpy as np
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
    transposed,
)
from products import PAIRS, Pair, check_close, check_exact, formats, product

import mixprec

SIZES = (0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100, 129, 257)
# 225 of the 3375 triples: k runs along the diagonals, so every pair of values of (M, N), (M, K)
# and (N, K) occurs exactly once.
TRIPLES = tuple(
    (m, n, SIZES[(i + j) % len(SIZES)]) for i, m in enumerate(SIZES) for j, n in enumerate(SIZES)
)


@formats
def test_small_integers_are_exact_for_all_sizes(backend: str, poisoned: None, pair: Pair) -> None:
    """And for any two layouts."""
    for i, (m, n, k) in enumerate(TRIPLES, start=PAIRS.index(pair)):
        a, b = small_integers((m, k), pair[0], seed=i), small_integers((k, n), pair[1], seed=-i)
        a, b = LAYOUTS[i % len(LAYOUTS)](a), LAYOUTS[i // len(LAYOUTS) % len(LAYOUTS)](b)
        out_dtype = WIDE[i % 3]
        c = mixprec.gemm(a, b, out_dtype=out_dtype)
        assert (c.dtype, c.is_contiguous()) == (out_dtype, True)
        check_exact(c, product(a, b), f"[{m}, {k}] @ [{k}, {n}] to {out_dtype}")


@for_each("pair", PAIRS)
def test_products_of_codes(backend: str, pair: Pair) -> None:
    """K = 1: one product, one rounding; of all FP8 codes, or of 700 patterns of 16 bits. The
    processor's BF16 dot product reads zero below 2^-126; such blocks are done in FP32."""
    if pair[0] in FP8:
        a, b = (from_bits(np.arange(256, dtype=np.uint8), dtype) for dtype in pair)
    else:
        a, b = (random_bits(700, dtype, seed) for seed, dtype in enumerate(pair))
    a, b = a[:, None], b[None]
    with np.errstate(invalid="ignore", over="ignore"):
        want = ind.values(a) * ind.values(b)
        for out_dtype in WIDE if pair[0] in FP8 else (torch.float32,):
            c = mixprec.gemm(a, b, out_dtype=out_dtype)
            if pair[0] == torch.bfloat16:  # sums may be flushed below FP32's normal numbers
                tiny = np.abs(want) < 2.0**-125
                want, c = np.where(tiny, 0.0, want), c.masked_fill(torch.from_numpy(tiny), 0.0)
            check_exact(c, want, str(out_dtype))


@for_each("bias_dtype, out_dtype", pairwise(WIDE, WIDE))
@formats
def test_one_rounding_after_scales_and_bias(
    backend: str, pair: Pair, bias_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Sums with more bits than any 16-bit output, exact in FP32: every early rounding shows."""
    for m, n, k in ((33, 70, 64), (64, 129, 200), (5, 3, 1)):
        a, b = small_integers((m, k), pair[0], seed=k), small_integers((k, n), pair[1], seed=n)
        bias = (normal((n,), torch.float64, seed=3) * 4096).round().div(1024).to(bias_dtype)
        exact = product(a, b) * 0.25 + ind.values(bias)
        assert (np.abs(exact) < 2.0**13).all()  # with 2^-10 as the last place: 23 bits
        c = mixprec.gemm(a, b, a_scale_inv=0.5, b_scale_inv=0.5, bias=bias, out_dtype=out_dtype)
        check_exact(c, exact, f"bias {bias_dtype}")
        for strided in (bias.repeat_interleave(2)[::2], bias[:1].expand(n)):
            c = mixprec.gemm(a, b, bias=strided, out_dtype=out_dtype)
            check_exact(c, product(a, b) + ind.values(strided))


@formats
def test_scales_and_default_output(backend: str, pair: Pair) -> None:
    a, b = normal((37, 50), pair[0], 1), normal((50, 29), pair[1], 2)
    c = mixprec.gemm(a, b)
    assert c.dtype == (torch.bfloat16 if pair[0] in FP8 else pair[0])
    check_close(c, a, b)
    for sa, sb in ((0.1, 3.0), (0.1, None), (None, 1 / 448), (1e-20, 1e20)):
        want = float(np.float32(sa or 1)) * float(np.float32(sb or 1))
        for out_dtype in WIDE:
            c = mixprec.gemm(a, b, a_scale_inv=sa, b_scale_inv=sb, out_dtype=out_dtype)
            check_close(c, a, b, want)
            ta, tb = (None if s is None else torch.tensor([s]) for s in (sa, sb))
            again = mixprec.gemm(a, b, a_scale_inv=ta, b_scale_inv=tb, out_dtype=out_dtype)
            ind.assert_same_bits(again, c)


@for_each("out_dtype", WIDE)
@formats
def test_random_and_one_signed_data_within_the_bound(
    backend: str, two_threads: None, pair: Pair, out_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((130, 140, 300), (9, 33, 4096), (1, 70, 4096), (70, 1, 513)):
        for positive in (False, True):
            a = torch.rand((m, k), generator=generator) - (0 if positive else 0.5)
            b = torch.rand((k, n), generator=generator) - (0 if positive else 0.5)
            a, b = a.to(pair[0]), transposed(b.to(pair[1]))
            c = mixprec.gemm(a, b, out_dtype=out_dtype)
            check_close(c, a, b)
            ind.assert_same_bits(mixprec.gemm(a, b, out_dtype=out_dtype), c, "second run")
            ind.assert_same_bits(mixprec.gemm(a, b, out_dtype=out_dtype, fast_accum=True), c)
            acc = torch.zeros(m, n)
            for at in range(0, k, 100):  # micro-batches of K
                mixprec.gemm_accumulate_(acc, a[:, at : at + 100], b[at : at + 100])
            check_close(acc, a, b)


@for_each("pair, out_dtype", pairwise(PAIRS, WIDE))
def test_nan_and_inf_propagate(backend: str, pair: Pair, out_dtype: torch.dtype) -> None:
    not_finite = (math.nan, math.inf, -math.inf)
    for m, n, k in ((17, 35, 40), (1, 1, 1), (64, 64, 129)):
        a, b = small_integers((m, k), pair[0], seed=1), small_integers((k, n), pair[1], seed=2)
        for bad, i, first in itertools.product(not_finite, (0, -1), (True, False)):
            left, right = a.clone(), b.clone()
            (left if first else right)[i, i] = bad  # E4M3 has no Inf: NaN or 448, both are fine
            c = mixprec.gemm(left, right, out_dtype=out_dtype)
            check_exact(c, product(left, right), f"{bad} in {'a' if first else 'b'}")
    bias = torch.tensor([1.0, math.nan, math.inf])
    c = mixprec.gemm(a[:2], b[:, :3], bias=bias, out_dtype=out_dtype)
    check_exact(c, product(a[:2], b[:, :3]) + ind.values(bias))


def test_overflow_is_inf_as_ieee_says(backend: str) -> None:
    a, big = torch.tensor([[2048.0, 1.0]]).half(), torch.full((2, 2), 2.0**127).bfloat16()
    for out_dtype in WIDE:
        for target in (65504.0, 65519.0, 65520.0, -65520.0, 1e6):
            b = torch.tensor([[target // 2048.0], [target % 2048.0]]).half()
            check_exact(mixprec.gemm(a, b, out_dtype=out_dtype), np.array([[target]]))
        assert mixprec.gemm(big, big, out_dtype=out_dtype).isposinf().all()


@formats
def test_accumulate_is_exact_and_stays_inside(backend: str, pair: Pair) -> None:
    """Into rows, columns or steps of a larger buffer, the rest of which keeps its bits."""
    for i, (m, n, k) in enumerate(TRIPLES[:: 1 if backend == "cpp" else 5]):
        a, b = small_integers((m, k), pair[0], seed=i), small_integers((k, n), pair[1], seed=-i)
        kind = (i + i // 15) % 3
        buffer = torch.randint(-9, 10, (2 * m + 3, 3 * n + 3)).float()
        buffer = transposed(buffer) if kind == 1 else buffer
        at = np.s_[1 : m + 1, 2 : n + 2] if kind < 2 else np.s_[1 : 2 * m : 2, 2 : 3 * n + 1 : 3]
        left, right = transposed(a) if i % 2 else a, transposed(b) if i % 3 else b
        for sa, sb in ((None, None), (0.25, 8.0)) if i % 7 == 0 else ((None, None),):
            want = buffer.clone()
            want[at] += torch.from_numpy(product(a, b) * (sa or 1.0) * (sb or 1.0)).float()
            mixprec.gemm_accumulate_(buffer[at], left, right, a_scale_inv=sa, b_scale_inv=sb)
            ind.assert_bits(buffer + 0.0, ind.bits(want + 0.0), f"{m} {n} {k} {at}")


def test_accumulate_edges(backend: str) -> None:
    nothing = torch.empty(3, 0).half(), torch.empty(0, 2).half()
    acc = torch.tensor([[math.nan, math.inf], [-0.0, 1.0], [2.0**-149, 3e38]])
    before = acc.clone()
    mixprec.gemm_accumulate_(acc, *nothing)
    ind.assert_same_bits(acc[0], before[0])
    ind.assert_same_bits(acc[1:] + 0.0, before[1:] + 0.0)
    ones = torch.ones(3, 4).half(), torch.ones(4, 2).half()
    mixprec.gemm_accumulate_(acc, *ones)
    check_exact(acc, ind.values(before) + 4.0)
    overflowing = torch.full((1, 1), 3e38)
    mixprec.gemm_accumulate_(overflowing, *[torch.full((1, 1), 1e19).bfloat16()] * 2)
    assert overflowing.isposinf().all()
