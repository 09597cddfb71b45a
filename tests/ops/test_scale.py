"""The public functions of a few scalars (scales, the clip factor, the loss scale's update), and of
gradients: any number of threads, scalars of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import independent as ind
import torch
from cases import GRADS, normal

from mixprec.ops import (
    clip_coef,
    grad_stats_,
    inv_scale,
    scale_from_amax_,
    underflow_share,
    unscale_,
    update_scale_,
)


def test_numbers(backend: str) -> None:
    """448 / 3 / 4 = 37.33, and the largest power of two in it."""
    scale, inverse = torch.tensor([1.0]), torch.tensor([1.0])
    for power_of_two, want in ((True, 32.0), (False, 448 / 3 / 4)):
        rule = {"margin": 2, "power_of_two": power_of_two}
        scale_from_amax_(scale, inverse, torch.tensor([3.0]), "e4m3", **rule)
        ind.assert_same_bits(scale, torch.tensor([want]))
        ind.assert_same_bits(inverse, inv_scale(scale))
    factor = clip_coef(torch.tensor([9.0, 16.0]).double(), 1.0)
    ind.assert_same_bits(factor, torch.tensor(1 / (5 + 1e-6)))
    assert clip_coef(torch.tensor(9.0).double(), 4.0).item() == 1.0
    state = (torch.tensor([8.0]), *(torch.ones(1).int() for _ in range(2)), torch.zeros(3).long())
    rule = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1}
    for found_inf, want in ((0.0, 20.0), (1.0, 5.0), (0.0, 15.0), (1.0, 3.75), (1.0, 2.0)):
        update_scale_(*state, torch.tensor(found_inf), min_scale=2.0, max_scale=20.0, **rule)
        assert state[0].item() == want
    assert state[3].tolist() == [3, 2, 2]
    want, rule = state[0].clone(), {"growth_factor": 1.1, "backoff_factor": 0.9}
    for found_inf, factor in ((0.0, 1.1), (0.0, 1.1), (1.0, 0.9)) * 30:  # in FP64, rounded once
        update_scale_(*state, torch.tensor(found_inf), growth_interval=1, **rule)
        want = (want.double() * factor).float()
        ind.assert_same_bits(state[0], want)


def test_underflow_share() -> None:
    """Of 20 elements 8 are 0, and 3 of the other 12 subnormal."""
    counts = torch.tensor([[0, 0, 5, 1], [2, 1, 3, 2]])
    assert underflow_share(counts, 20).item() == 0.25
    assert underflow_share(torch.tensor([[0, 0, 7, 0]]), 7).item() == 1.0  # nothing is left
    assert underflow_share(torch.tensor([[0, 0, 6, 0]]), 7).item() == 0.0
    assert underflow_share(torch.zeros(0, 4).long(), 0).item() == 0.0


def test_sums_have_the_same_bits_for_any_number_of_threads(
    set_threads: Callable[[int], None],
) -> None:
    """Of the kernels; the reference sums in torch's order."""
    grads = [normal((n,), d, seed=n) for n in (300_001, 17, 70_000) for d in GRADS]
    grads.append(normal((301, 997), torch.float32).t())
    seen = set()
    for threads in (1, 2, 3, 1, 2):
        set_threads(threads)
        sum_sq = torch.zeros(len(grads), dtype=torch.float64)
        grad_stats_(grads, torch.tensor(0.3), torch.zeros(1), sum_sq)
        seen.add(tuple(sum_sq.tolist()))
    assert len(seen) == 1


def test_the_shape_of_scalars_is_free(backend: str) -> None:
    for shape in ((), (1,), (1, 1)):
        found_inf, sum_sq = torch.zeros(shape), torch.zeros(1, dtype=torch.float64)
        grad_stats_([torch.tensor([2.0, math.nan])], torch.ones(shape), found_inf, sum_sq)
        assert found_inf.item() == 1.0
        grads, counts = [torch.tensor([2.0, 0.0])], torch.zeros((1, 4), dtype=torch.int64)
        unscale_(grads, torch.full(shape, 0.5), found_inf, counts)
        assert (grads[0].tolist(), counts.tolist()) == ([1.0, 0.0], [[0, 0, 1, 0]])
