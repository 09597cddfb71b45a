"""unscale_ and grad_stats_: their results on any number of threads, and scalars of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from cases import GRADS, normal

from mixprec.ops import grad_stats_, unscale_


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
