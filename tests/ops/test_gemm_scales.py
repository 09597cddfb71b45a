"""gemm and gemm_accumulate_ with a scale per row or block, in any two granularities."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import FP8, WIDE, for_each, normal, small_integers, transposed
from products import PAIRS, check_exact

import mixprec
from mixprec.testing import assert_close, tolerance

# The granularities of a's scales, as (rows per scale, K per scale); b's are the same of b^T.
GRANULARITIES = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "rows of 128": (128, None),
}
MIXED = [(x, y) for i, x in enumerate(GRANULARITIES) for j, y in enumerate(GRANULARITIES) if i + j]
# M, N, K: ragged in every dimension; one block, less than one, several; none.
SIZES = ((130, 257, 300), (1, 1, 1), (128, 128, 128), (5, 129, 256), (300, 3, 129), (33, 140, 511))
SIZES += ((0, 3, 0), (1, 3, 0), (5, 3, 0), (64, 3, 0), (0, 3, 200), (200, 0, 130), (0, 0, 0))


def scaled(
    x: torch.Tensor, kind: str, seed: int, scales: tuple[float, ...]
) -> tuple[torch.Tensor, np.ndarray]:
    """Scales for x [rows, K], drawn from `scales`, and the elements of x times their own."""
    per = [p or max(n, 1) for n, p in zip(x.shape, GRANULARITIES[kind], strict=True)]
    size = [
        -(-n // p) if given else 1
        for n, p, given in zip(x.shape, per, GRANULARITIES[kind], strict=True)
    ]
    rng = np.random.default_rng(seed)
    scale_inv = torch.from_numpy(rng.choice(np.array(scales, np.float32), size))
    index = np.ix_(*(np.arange(n) // p for n, p in zip(x.shape, per, strict=True)))
    return scale_inv, ind.values(x) * ind.values(scale_inv)[index]


@for_each("kinds", MIXED)
def test_scales_of_blocks_on_small_integers(
    backend: str, poisoned: None, two_threads: None, kinds: tuple[str, str]
) -> None:
    """Powers of two, whose sums stay below 2^24 units: exact, whatever is multiplied when."""
    for i, (m, n, k) in enumerate(SIZES):
        pair = PAIRS[i % len(PAIRS)]
        a, b = small_integers((m, k), pair[0], 4, seed=i), small_integers((n, k), pair[1], 4, -i)
        sa, left = scaled(a, kinds[0], i, (0.5, 1.0, 4.0))
        sb, right = scaled(b, kinds[1], -i + 99, (0.25, 1.0, 2.0))
        if i % 2:  # a transposed view of a contiguous table, and the other way around
            sa, sb = transposed(sa), transposed(sb)
        bias = small_integers((n,), torch.float32, seed=7)
        out_dtype = WIDE[(i + len("".join(kinds))) % 3]
        scales = {"a_scale_inv": sa, "b_scale_inv": sb.t()}
        c = mixprec.gemm(a, b.t(), **scales, bias=bias, out_dtype=out_dtype)
        check_exact(c, left @ right.T + ind.values(bias), f"{pair} {m} {n} {k}")
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
        a, b = (x.abs().to(d) if i else x.to(d) for x, d in zip((a, b), pair, strict=True))
        (sa, left), (sb, right) = scaled(a, kinds[0], i, values), scaled(b, kinds[1], 5, values)
        left, right = torch.from_numpy(left), torch.from_numpy(right).t()
        want, scales = left @ right, {"a_scale_inv": sa, "b_scale_inv": sb.t()}
        c = mixprec.gemm(a, b.t(), **scales, out_dtype=out_dtype)
        assert_close(c, want, tolerance(want, left, right, out_dtype))
        acc = torch.zeros(m, n)
        mixprec.gemm_accumulate_(acc, a, b.t(), **scales)
        assert_close(acc, want, tolerance(want, left, right, torch.float32))


def test_nan_stays_in_its_row(backend: str) -> None:
    b = small_integers((300, 40), FP8[0])
    for at in ((0, 0), (-1, -1), (3, 200)):
        for bad in (math.nan, math.inf):
            a = small_integers((70, 300), FP8[1], seed=1)
            a[at] = bad
            with np.errstate(invalid="ignore"):
                s, wide = scaled(a, "block1x128", 1, (0.5, 2.0))
                want = wide @ ind.values(b)
            check_exact(mixprec.gemm(a, b, a_scale_inv=s, out_dtype=torch.float32), want)


@for_each("kinds", [("row", "row"), ("block1x128", "block128x128"), ("tensor", "row")])
def test_quantized_operands_bring_their_scales(backend: str, kinds: tuple[str, str]) -> None:
    operands, values = [], []
    for rows, fmt, kind in zip((140, 150), (mixprec.E4M3, mixprec.E5M2), kinds, strict=True):
        t = small_integers((rows, 300), fmt.dtype, seed=rows)
        s, wide = scaled(t, kind, 1, (0.25, 0.5, 2.0))
        operands.append(mixprec.Quantized(t, s, torch.zeros(()), None, None, fmt, kind))
        values.append(wide)
    (x, w), want = operands, values[0] @ values[1].T
    got = mixprec.gemm(x, w.data.t(), b_scale_inv=w.scale_inv.t(), out_dtype=torch.float32)
    check_exact(got, want)
    check_exact(mixprec.gemm(x, w.t(), out_dtype=torch.float32), want)
    check_exact(mixprec.gemm(w, x.t(), out_dtype=torch.float32), want.T)
