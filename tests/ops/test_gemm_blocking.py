"""gemm on the CPU: sizes at which a pass over K, the columns packed at a time or a tile ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from cases import contiguous, name, small_integers, transposed
from emulated.values.test_gemm_values import check, product, scaled

import mixprec
from mixprec.testing import assert_close, tolerance

CPU_SIZES = (
    # M, N, K: one pass and tiles of columns; several passes; several times as many as are packed
    (700, 300, 512),
    (230, 1100, 513),
    (13, 4200, 1100),
    (225, 1030, 2049),
    (500, 33, 5000),
    (8200, 40, 2100),
)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=name)
def test_sums_are_exact(dtype: torch.dtype, threads: None) -> None:
    for i, (m, n, k) in enumerate(CPU_SIZES):
        a, b = small_integers((m, k), dtype, seed=i), small_integers((k, n), dtype, seed=-i)
        want = a.float() @ b.float()
        for x, y in ((a, b), (transposed(a), transposed(b))):
            got = mixprec.gemm(x, y, out_dtype=torch.float32)
            assert torch.equal(got, want), (m, n, k)
        acc = torch.ones(m, n)
        mixprec.gemm_accumulate_(acc, a, b)
        assert torch.equal(acc, want + 1), (m, n, k)


def test_scales_by_blocks_of_k() -> None:
    """Powers of two, so that every sum is exact."""
    for m, n, k in CPU_SIZES[1:]:
        a, b = (small_integers(s, torch.float8_e4m3fn, seed=k) for s in ((m, k), (n, k)))
        (of_a, wide_a), (of_b, wide_b) = scaled(a, "block1x128", 1), scaled(b, "block128x128", 2)
        c = mixprec.gemm(a, b.t(), a_scale_inv=of_a, b_scale_inv=of_b.t(), out_dtype=torch.float32)
        check(c, wide_a @ wide_b.t(), f"{m} {n} {k}")


def test_operands_larger_than_the_packing_buffer(two_threads: None) -> None:
    """The CPU kernels pack 32 MB of an operand at a time: both sides in more than one block."""
    large = small_integers((2950, 2950), torch.float16, seed=1)  # 33 MB as FP32 words
    thin = small_integers((2950, 5), torch.float16, seed=2)
    for a, b in ((large, thin), (thin.t(), large)):
        check(mixprec.gemm(a, b, out_dtype=torch.float32), product(a, b), f"{tuple(a.shape)}")
    small = small_integers((2_900_000, 3), torch.float16, seed=3)
    left, right = small.t(), small[:, 1:]  # K so long that few rows fit
    want = product(left, right)
    got = mixprec.gemm(left, right, out_dtype=torch.float32)
    assert_close(got, want, tolerance(want, left, right, torch.float32))


@pytest.mark.parametrize("at", [0, 511, 3000, 4099])
@pytest.mark.parametrize(("m", "n"), [(500, 33), (20, 1100)])
def test_a_bf16_subnormal_in_any_pass_is_not_lost(at: int, m: int, n: int, threads: None) -> None:
    """K ends with a few elements of their own. Of either operand, in whole panels and remainders,
    whichever way they are packed."""
    orders = (contiguous, transposed)
    for of_a, place, order in itertools.product((True, False), (0, 1, 18, -1), orders):
        a, b = torch.zeros(m, 4100).bfloat16(), torch.zeros(4100, n).bfloat16()
        a[:, at], b[at] = 2.0**60, 2.0**60
        (a[:, at] if of_a else b[at])[place] = 2.0**-130
        got = mixprec.gemm(order(a), order(b), out_dtype=torch.float32)
        assert torch.equal(got, a[:, at, None].float() * b[at].float())


def test_subnormal_results_are_rounded(threads: None) -> None:
    """As bf16, of whole and of partial tiles: 2^-133 is the smallest number."""
    a, b = (small_integers((m, 40), torch.float8_e4m3fn, seed=m) for m in (50, 75))
    of_a, of_b = torch.tensor(2.0**-100), torch.tensor(2.0**-35)
    got = mixprec.gemm(a, b.t(), a_scale_inv=of_a, b_scale_inv=of_b)
    want = (a.float() @ b.float().t() * of_a * of_b).bfloat16()
    assert want.count_nonzero() > 1000
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
