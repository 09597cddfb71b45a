"""grad_stats_: the finite flag and the sum of squares, in one read that changes nothing else."""

from __future__ import annotations

import math
import random

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    GRADS,
    LAYOUTS,
    SHAPES,
    Layout,
    for_each,
    from_bits,
    normal,
    random_bits,
    random_list,
)
from hypothesis import given
from hypothesis import strategies as st

from mixprec.ops import grad_stats_


def per_gradient(
    grads: list[torch.Tensor], inv_scale: float | None = None, flag: float = 0.0
) -> tuple[float, list[float], list[list[int]]]:
    """(found_inf, sum_sq, counts); the gradients must come out untouched, the tables are
    overwritten, and asking for the counts changes nothing else."""
    before = [ind.bits(g).copy() for g in grads]
    found_inf, alone = torch.tensor([flag]), torch.tensor([flag])
    sum_sq, same = (torch.full((len(grads),), -7.0, dtype=torch.float64) for _ in range(2))
    counts = torch.full((len(grads), 4), -7)
    inv = None if inv_scale is None else torch.tensor(inv_scale)
    grad_stats_(grads, inv, found_inf, sum_sq, counts)
    grad_stats_(grads, inv, alone, same)
    ind.assert_same_bits(sum_sq, same, "without counts")
    assert found_inf.item() == alone.item()
    for grad, pattern in zip(grads, before, strict=True):
        assert np.array_equal(ind.bits(grad), pattern), "grad_stats_ wrote to a gradient"
    return found_inf.item(), sum_sq.tolist(), counts.tolist()


def stats(
    grads: list[torch.Tensor], inv_scale: float | None = None, flag: float = 0.0
) -> tuple[float, float]:
    """(found_inf, the sum over all gradients)"""
    found_inf, sum_sq, _ = per_gradient(grads, inv_scale, flag)
    return found_inf, sum(sum_sq)


def check(grads: list[torch.Tensor], inv_scale: float | None = None) -> None:
    flag, sums, counts = per_gradient(grads, inv_scale)
    assert flag == 0.0
    for grad, sum_sq, kinds in zip(grads, sums, counts, strict=True):
        want = ind.sum_of_squares([grad], inv_scale)
        # FP64 sums of up to 2^20 squares of FP32 numbers: far inside one unit of FP32.
        assert sum_sq == pytest.approx(want, rel=1e-13, abs=0), "not an FP64 sum"
        assert kinds == ind.grad_counts(grad, inv_scale)


@for_each("layout", LAYOUTS)
@for_each("dtype", GRADS)
def test_shapes_and_layouts(backend: str, dtype: torch.dtype, layout: Layout) -> None:
    grads = [layout(normal(shape, dtype, seed=i)) for i, shape in enumerate(SHAPES)]
    check(grads)
    check(grads, 0.3)
    for grad in grads:
        check([grad], 2.0**-5)


def test_every_element_counts_once(backend: str) -> None:
    """Powers of 4 that sum exactly: a missed or doubled element shows in the bits."""
    for n in (1, 15, 16, 17, 33, 1000, 70001):
        grad = torch.full((n,), 0.5)
        for at in (0, n // 2, n - 1):
            grad[at] = 2.0**10
            assert stats([grad]) == (0.0, (n - 1) * 0.25 + 2.0**20)
            grad[at] = 0.5


@given(st.integers(1, 100), st.integers(0, 1 << 30), st.sampled_from([None, 1.0, 0.3, 2.0**-16]))
def test_lists(count: int, seed: int, inv_scale: float | None) -> None:
    grads = random_list(random.Random(seed), count)
    check(grads, inv_scale)


def test_same_bits_on_repeat_and_for_any_number_of_threads() -> None:
    """Of the kernels; the reference sums in torch's order."""
    grads = [normal((n,), d, seed=n) for n in (300_001, 17, 70_000) for d in GRADS]
    grads.append(normal((301, 997), torch.float32).t())
    before = torch.get_num_threads()
    try:
        seen = set()
        for threads in (1, 2, 3, 1, 2):
            torch.set_num_threads(threads)
            seen |= {stats(grads, 0.3), stats(grads, 0.3)}
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@for_each("inv_scale", [None, 1.0, 0.25])
@for_each("dtype", GRADS)
def test_planted_anywhere(backend: str, dtype: torch.dtype, inv_scale: float | None) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for tensor in (0, 2, -1):
            for element in (0, 31, -1):
                grads = [torch.ones(67, dtype=d) for d in (dtype, torch.float32, dtype)]
                grads.insert(1, torch.ones(0, dtype=dtype))
                grads[tensor][element] = bad
                flag, sum_sq = stats(grads, inv_scale)
                assert flag == 1.0
                assert not math.isfinite(sum_sq)


@for_each("inv_scale", [None, 0.5, 2.0, 0.0])
@for_each("dtype", GRADS)
def test_counts(backend: str, dtype: torch.dtype, inv_scale: float | None) -> None:
    """Of every 16-bit code, or of patterns of every exponent, in tensors of all kinds of length."""
    if dtype.itemsize == 2:
        every = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    else:
        every = torch.cat([random_bits(30_000, dtype), torch.tensor(EDGES[dtype], dtype=dtype)])
    grads = [every[:0], every, every[1::3], every[:7], every.flip(0), torch.ones(3, dtype=dtype)]
    flag, _, counts = per_gradient(grads, inv_scale)
    assert flag == 1.0
    assert counts == [ind.grad_counts(grad, inv_scale) for grad in grads]
    assert counts[0] == counts[-1] == [0, 0, 0, 0]
    if inv_scale != 0:  # which makes NaN of Inf
        assert all(n > 0 for n in counts[1]), "a kind that was never met"


EDGES = {
    torch.float32: [0.0, -0.0, 2.0**-149, -(2.0**-127), 2.0**-126, 3.4e38, math.inf, math.nan],
    torch.float64: [0.0, -0.0, 5e-324, -1e-310, 2.0**-1022, 1.7e308, -math.inf, math.nan],
}


def test_counts_of_a_parallel_run(two_threads: None) -> None:
    grad = torch.zeros(300_001, dtype=torch.float16)
    grad[::2] = 1.0
    grad[1::4] = 2.0**-20
    grad[[0, -1]] = math.nan
    grad[150_000] = math.inf
    _, _, counts = per_gradient([grad, grad[:17], grad])
    assert counts[0] == counts[2] == ind.grad_counts(grad, None)
    assert counts[0][:2] == [1, 2]


def test_largest_finite_gradients_are_finite(backend: str) -> None:
    """Their FP32 sum of squares would overflow; neither the flag nor the FP64 sum does."""
    grads = [torch.full((1000,), torch.finfo(d).max, dtype=d) for d in GRADS[:3]]
    check(grads)
    check(grads, 1.0)
    flag, sum_sq = stats([torch.full((5,), 1e300, dtype=torch.float64)])
    assert (flag, sum_sq) == (0.0, math.inf)  # FP64 gradients can; that is no overflow of theirs


def test_overflow_made_by_unscaling_is_found(backend: str) -> None:
    assert stats([torch.tensor([1.0, 3e38])], 2.0)[0] == 1.0
    assert stats([torch.tensor([1e308], dtype=torch.float64)], 3.0)[0] == 1.0
    # The product is FP32 here, not rounded to FP16: 131008 is finite.
    assert stats([torch.tensor([65504.0]).half()], 2.0) == (0.0, 131008.0**2)
    assert stats([torch.tensor([math.inf])], 0.0)[0] == 1.0


def test_flag_is_only_ever_set_and_the_sum_overwritten(backend: str) -> None:
    for grads, inv_scale, total in (
        ([torch.tensor([3.0, 4.0])], None, 25.0),
        ([], 0.5, 0.0),
        ([torch.empty(0), torch.empty(3, 0)], None, 0.0),
    ):
        for flag in (0.0, 1.0, 2.0):
            assert stats(grads, inv_scale, flag) == (flag, total)
    for shape in ((), (1,), (1, 1)):  # the scalars' shape is free
        found_inf, sum_sq = torch.zeros(shape), torch.zeros(1, dtype=torch.float64)
        grad_stats_([torch.tensor([2.0, math.nan])], torch.ones(shape), found_inf, sum_sq)
        assert found_inf.item() == 1.0
    grad = torch.tensor([3.0, 4.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^grad_stats_: .*no derivative"):
        stats([grad])
    with torch.no_grad():
        assert stats([grad]) == (0.0, 25.0)
