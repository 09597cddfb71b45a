"""gemm and gemm_accumulate_: exact where sums are exact, within the derived bound elsewhere."""

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
    WRITABLE,
    Layout,
    for_each,
    from_bits,
    name,
    normal,
    pairwise,
    random_bits,
    small_integers,
    transposed,
)

import mixprec
from mixprec.testing import assert_close, tolerance

Pair = tuple[torch.dtype, torch.dtype]
PAIRS = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    *((a, b) for a in FP8 for b in FP8),
)
SIZES = (0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100, 129, 257)
# 225 of the 3375 triples: k runs along the diagonals, so every pair of values of (M, N), (M, K)
# and (N, K) occurs exactly once.
TRIPLES = tuple(
    (m, n, SIZES[(i + j) % len(SIZES)]) for i, m in enumerate(SIZES) for j, n in enumerate(SIZES)
)


def pair_id(pair: Pair) -> str:
    return "-".join(name(d).removeprefix("float8_") for d in pair)


formats = pytest.mark.parametrize("pair", PAIRS, ids=pair_id)


def product(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """a @ b of the decoded values in FP64."""
    with np.errstate(invalid="ignore"):
        return ind.values(a) @ ind.values(b)


def check_exact(c: torch.Tensor, want: np.ndarray, what: str = "gemm") -> None:
    """c is `want` after one rounding; the sign of a zero is left open."""
    pattern = ind.narrow(want, c.dtype)
    negative_zero = pattern == 1 << (8 * pattern.itemsize - 1)
    ind.assert_bits(c + 0.0, np.where(negative_zero, 0, pattern).astype(pattern.dtype), what)


def check_close(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, extra: float = 1.0) -> None:
    """c is a @ b * extra within the bound of FP32 accumulation."""
    a64, b64 = torch.from_numpy(ind.values(a) * extra), torch.from_numpy(ind.values(b))
    want = a64 @ b64
    assert_close(c, want, tolerance(want, a64, b64, c.dtype))


@formats
def test_small_integers_are_exact_for_all_sizes(backend: str, poisoned: None, pair: Pair) -> None:
    for i, (m, n, k) in enumerate(TRIPLES):
        a, b = small_integers((m, k), pair[0], seed=i), small_integers((k, n), pair[1], seed=-i)
        if i % 2:
            a = transposed(a)
        if i % 4 > 1:
            b = transposed(b)
        out_dtype = WIDE[i % 3]
        c = mixprec.gemm(a, b, out_dtype=out_dtype)
        assert (c.dtype, c.is_contiguous()) == (out_dtype, True)
        check_exact(c, product(a, b), f"[{m}, {k}] @ [{k}, {n}] to {out_dtype}")


@for_each("layout_a, layout_b, pair", pairwise(LAYOUTS, LAYOUTS, PAIRS))
def test_all_layouts(
    backend: str, poisoned: None, layout_a: Layout, layout_b: Layout, pair: Pair
) -> None:
    for m, n, k in ((17, 33, 40), (1, 19, 7), (37, 1, 70)):
        a = layout_a(small_integers((m, k), pair[0], seed=m))
        b = layout_b(small_integers((k, n), pair[1], seed=n))
        before = ind.bits(a), ind.bits(b)
        check_exact(mixprec.gemm(a, b, out_dtype=torch.float32), product(a, b), pair_id(pair))
        assert np.array_equal(ind.bits(a), before[0])
        assert np.array_equal(ind.bits(b), before[1])
        if layout_a in WRITABLE:
            acc = layout_a(start := small_integers((m, n), torch.float32, seed=3))
            mixprec.gemm_accumulate_(acc, a, b, a_scale_inv=0.5, b_scale_inv=4.0)
            check_exact(acc, ind.values(start) + product(a, b) * 2.0)


@for_each("pair", [p for p in PAIRS if p[0] in FP8])
def test_all_products_of_fp8_codes(backend: str, pair: Pair) -> None:
    codes = np.arange(256, dtype=np.uint8)
    a, b = from_bits(codes, pair[0]).view(256, 1), from_bits(codes, pair[1]).view(1, 256)
    with np.errstate(invalid="ignore"):
        want = ind.values(a) * ind.values(b)  # exact in FP64, and in FP32
    for out_dtype in WIDE:
        check_exact(mixprec.gemm(a, b, out_dtype=out_dtype), want, str(out_dtype))


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bit_codes(backend: str, dtype: torch.dtype) -> None:
    """K = 1: one product, one rounding to FP32, overflowing ones included."""
    a, b = random_bits(700, dtype, 1).view(700, 1), random_bits(700, dtype, 2).view(1, 700)
    with np.errstate(invalid="ignore", over="ignore"):
        want = ind.values(a) * ind.values(b)
        c = mixprec.gemm(a, b, out_dtype=torch.float32)
        if dtype == torch.bfloat16:  # sums may be flushed below FP32's normal numbers
            tiny = np.abs(want) < 2.0**-125
            want, c = np.where(tiny, 0.0, want), c.masked_fill(torch.from_numpy(tiny), 0.0)
        check_exact(c, want)


def test_bf16_subnormal_operands_are_exact(backend: str) -> None:
    """The processor's BF16 dot product reads zero below 2^-126; such blocks are done in FP32."""
    tiny = from_bits(np.array([1, 3, 0x40, 0x7F, 0x8001, 0x807F], np.uint16), torch.bfloat16)
    big = torch.tensor([[1.0, 2.0**40, -3.0, 2.0**127]]).bfloat16()
    exact = ind.values(tiny)[:, None] * ind.values(big)
    for got in (
        mixprec.gemm(tiny[:, None], big, out_dtype=torch.float32),
        mixprec.gemm(big.t(), tiny[None], out_dtype=torch.float32).t(),
    ):
        np.testing.assert_array_equal(ind.values(got), exact)


@for_each("at", [0, 1, 63, 4000])
@for_each("transposed", [False, True])
def test_one_bf16_subnormal_anywhere_is_not_lost(backend: str, at: int, transposed: bool) -> None:
    """In whole panels and in remainders, in rows and in columns, whichever way they are packed."""
    b = torch.zeros(70, 100, dtype=torch.bfloat16)
    b.view(-1)[at] = 2.0**-130
    a = torch.full((40, 70), 2.0**100).bfloat16()
    if transposed:
        a, b = b.t().contiguous(), a.t().contiguous()
    got = mixprec.gemm(a, b, out_dtype=torch.float32)
    assert (got != 0).sum() == 40
    assert got.max() == 2.0**-30


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


def test_operands_larger_than_the_packing_buffer(two_threads: None) -> None:
    """The CPU kernels pack 32 MB of an operand at a time: both sides in more than one block."""
    large = small_integers((2950, 2950), torch.float16, seed=1)  # 33 MB as FP32 words
    thin = small_integers((2950, 5), torch.float16, seed=2)
    check_exact(mixprec.gemm(large, thin, out_dtype=torch.float32), product(large, thin))
    check_exact(mixprec.gemm(thin.t(), large, out_dtype=torch.float32), product(thin.t(), large))
    small = small_integers((2_900_000, 3), torch.float16, seed=3)
    left, right = small.t(), small[:, 1:]  # K so long that few rows fit
    check_close(mixprec.gemm(left, right, out_dtype=torch.float32), left, right)


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


@for_each("pair, out_dtype", pairwise(PAIRS, WIDE))
def test_empty_sizes(backend: str, poisoned: None, pair: Pair, out_dtype: torch.dtype) -> None:
    full = torch.tensor([1.5, -2.0, 0.25])
    sizes = ((0, 3, 0), (1, 3, 0), (5, 3, 0), (64, 3, 0), (0, 3, 200), (200, 0, 130), (0, 0, 0))
    for kind in GRANULARITIES:
        for m, n, k in sizes:
            a, b, bias = torch.ones(m, k).to(pair[0]), torch.ones(k, n).to(pair[1]), full[:n]
            scales = {
                "a_scale_inv": some_scales((m, k), kind, 1, (2.0,)),
                "b_scale_inv": some_scales((n, k), kind, 2, (2.0,)).t(),
            }
            check_exact(mixprec.gemm(a, b, out_dtype=out_dtype), np.zeros((m, n)))
            c = mixprec.gemm(a, b, **scales, bias=bias, out_dtype=out_dtype)
            check_exact(c, np.zeros((m, n)) + ind.values(bias))
            acc = torch.ones(m, n)
            mixprec.gemm_accumulate_(acc, a, b, **scales)
            assert (acc == 1).all()


# The granularities of a's scales, as (rows per scale, K per scale); b's are the same of b^T.
GRANULARITIES = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "rows of 128": (128, None),
}
MIXED = [(x, y) for i, x in enumerate(GRANULARITIES) for j, y in enumerate(GRANULARITIES) if i + j]


def some_scales(shape: tuple[int, int], kind: str, seed: int, values: tuple) -> torch.Tensor:
    """Scales of `kind` for an operand of `shape` [rows, K], drawn from `values`."""
    per = GRANULARITIES[kind]
    size = [1 if p is None else -(-n // p) for n, p in zip(shape, per, strict=True)]
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.choice(np.array(values, np.float32), size))


def spread(scale_inv: torch.Tensor, shape: tuple[int, int], kind: str) -> np.ndarray:
    """The scale of every element of an operand of `shape`, by looking each one up."""
    s, per = ind.values(scale_inv), GRANULARITIES[kind]
    r, k = (np.arange(n) // (p or n) if n else [] for n, p in zip(shape, per, strict=True))
    return s[np.ix_(np.array(r, int), np.array(k, int))]


# Ragged in every dimension; one block, less than one, several.
BLOCKY = ((130, 257, 300), (1, 1, 1), (128, 128, 128), (5, 129, 256), (300, 3, 129), (33, 140, 511))


@for_each("kinds", MIXED)
def test_scales_of_blocks_on_small_integers(
    backend: str, poisoned: None, two_threads: None, kinds: tuple[str, str]
) -> None:
    """Powers of two, whose sums stay below 2^24 units: exact, whatever is multiplied when."""
    for i, (m, n, k) in enumerate(BLOCKY):
        pair = PAIRS[i % len(PAIRS)]
        a, b = small_integers((m, k), pair[0], 4, seed=i), small_integers((n, k), pair[1], 4, -i)
        sa = some_scales((m, k), kinds[0], i, (0.5, 1.0, 4.0))
        sb = some_scales((n, k), kinds[1], -i + 99, (0.25, 1.0, 2.0))
        left = ind.values(a) * spread(sa, (m, k), kinds[0])
        right = ind.values(b) * spread(sb, (n, k), kinds[1])
        if i % 2:  # a transposed view of a contiguous table, and the other way around
            sa, sb = transposed(sa), transposed(sb)
        bias = small_integers((n,), torch.float32, seed=7)
        out_dtype = WIDE[(i + len("".join(kinds))) % 3]
        scales = {"a_scale_inv": sa, "b_scale_inv": sb.t()}
        c = mixprec.gemm(a, b.t(), **scales, bias=bias, out_dtype=out_dtype)
        check_exact(c, left @ right.T + ind.values(bias), f"{pair_id(pair)} {m} {n} {k}")
        start = small_integers((m, n), torch.float32, seed=8)
        acc = transposed(start)
        mixprec.gemm_accumulate_(acc, a, b.t(), **scales)
        check_exact(acc, ind.values(start) + left @ right.T)


@for_each("kinds, out_dtype", [(k, WIDE[i % 3]) for i, k in enumerate(MIXED)])
def test_scales_of_blocks_within_the_bound(
    backend: str, kinds: tuple[str, str], out_dtype: torch.dtype
) -> None:
    """Scales that are no powers of two, wide apart, on random and on one-signed data."""
    values = (0.1, 1.0, 3.7, 1e-3, 1 / 448)
    for i, (m, n, k) in enumerate(((70, 257, 300), (9, 33, 1100))):
        pair = PAIRS[(i + len(kinds[0])) % len(PAIRS)]
        a, b = normal((m, k), torch.float32, i), normal((n, k), torch.float32, i + 9)
        if i:
            a, b = a.abs(), b.abs()
        a, b = a.to(pair[0]), b.to(pair[1])
        sa, sb = some_scales((m, k), kinds[0], i, values), some_scales((n, k), kinds[1], 5, values)
        left = torch.from_numpy(ind.values(a) * spread(sa, (m, k), kinds[0]))
        right = torch.from_numpy(ind.values(b) * spread(sb, (n, k), kinds[1])).t()
        want = left @ right
        c = mixprec.gemm(a, b.t(), a_scale_inv=sa, b_scale_inv=sb.t(), out_dtype=out_dtype)
        assert_close(c, want, tolerance(want, left, right, out_dtype))
        again = mixprec.gemm(a, b.t(), a_scale_inv=sa, b_scale_inv=sb.t(), out_dtype=out_dtype)
        ind.assert_same_bits(again, c, "second run")
        if out_dtype == torch.float32:
            acc = torch.zeros(m, n)
            mixprec.gemm_accumulate_(acc, a, b.t(), a_scale_inv=sa, b_scale_inv=sb.t())
            assert_close(acc, want, tolerance(want, left, right, out_dtype))


@formats
def test_one_hot_rows_select_the_scaled_entry(backend: str, pair: Pair) -> None:
    """Every element of b meets its own scale, which is another one in each block."""
    m, n, k = 300, 150, 300
    values = tuple(2.0**e for e in range(-20, 21))
    rows = np.random.default_rng(0).permutation(k)
    a = torch.zeros(m, k)
    a[torch.arange(m), torch.from_numpy(rows)] = 1.0
    a, b = a.to(pair[0]), small_integers((n, k), pair[1], seed=1)
    for kind in GRANULARITIES:
        s = some_scales((n, k), kind, 3, values)
        want = (ind.values(b) * spread(s, (n, k), kind)).T[rows]
        check_exact(mixprec.gemm(a, b.t(), b_scale_inv=s.t(), out_dtype=torch.float32), want, kind)
        c = mixprec.gemm(b, a.t(), a_scale_inv=s, out_dtype=torch.float32)
        check_exact(c, want.T, kind)


def test_nan_stays_in_its_row_with_scales_of_blocks(backend: str) -> None:
    a, b = small_integers((70, 300), FP8[1], seed=1), small_integers((300, 40), FP8[0])
    s = some_scales((70, 300), "block1x128", 1, (0.5, 2.0))
    for at in ((0, 0), (-1, -1), (3, 200)):
        for bad in (math.nan, math.inf):
            dirty = a.clone()
            dirty[at] = bad
            with np.errstate(invalid="ignore"):
                want = (ind.values(dirty) * spread(s, (70, 300), "block1x128")) @ ind.values(b)
            check_exact(mixprec.gemm(dirty, b, a_scale_inv=s, out_dtype=torch.float32), want)


@for_each("kinds", [("row", "row"), ("block1x128", "block128x128"), ("tensor", "row")])
def test_quantized_operands_bring_their_scales(backend: str, kinds: tuple[str, str]) -> None:
    operands, values = [], []
    for rows, fmt, kind in zip((140, 150), (mixprec.E4M3, mixprec.E5M2), kinds, strict=True):
        t = small_integers((rows, 300), fmt.dtype, seed=rows)
        s = some_scales(t.shape, kind, 1, (0.25, 0.5, 2.0))
        operands.append(mixprec.Quantized(t, s, torch.zeros(()), None, None, fmt, kind))
        values.append(ind.values(t) * spread(s, t.shape, kind))
    (x, w), want = operands, values[0] @ values[1].T
    got = mixprec.gemm(x, w.data.t(), b_scale_inv=w.scale_inv.t(), out_dtype=torch.float32)
    check_exact(got, want)
    check_exact(mixprec.gemm(x, w.t(), out_dtype=torch.float32), want)
    check_exact(mixprec.gemm(w, x.t(), out_dtype=torch.float32), want.T)


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
        for scale in (None, 0.25) if i % 7 == 0 else (None,):
            want = buffer.clone()
            want[at] += torch.from_numpy(product(a, b) * (scale or 1.0)).float()
            mixprec.gemm_accumulate_(buffer[at], left, right, a_scale_inv=scale)
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
