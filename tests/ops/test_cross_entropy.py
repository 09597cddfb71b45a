"""cross_entropy and cross_entropy_backward: with their references, and against torch in FP64."""

from __future__ import annotations

import math

import independent as ind
import torch
from cases import LAYOUTS, WIDE, Layout, for_each, normal, pairwise

from mixprec.ops.cross_entropy import (
    cross_entropy_backward_op,
    cross_entropy_op,
    cross_entropy_reference,
)
from mixprec.testing import assert_close

SHAPES = ((0, 5), (3, 0), (1, 1), (7, 47), (5, 480), (2, 1009))  # around blocks and vectors
CAPS = (0.0, 5.0, 1e6)
START = torch.tensor([-math.inf, 0.0, math.nan, 0.0])


def inputs(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = normal(shape, torch.float32) * 4
    return logits, torch.arange(shape[0]) * 7 % max(1, shape[1])


def capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * (logits.double() / softcap).tanh() if softcap else logits.double()


@for_each("layout, shape, softcap", pairwise(LAYOUTS, SHAPES, CAPS))
def test_statistics(
    poisoned: None, two_threads: None, layout: Layout, shape: tuple[int, ...], softcap: float
) -> None:
    """Of all classes in one tile, and in two."""
    logits, target = inputs(shape)
    logits, half = layout(logits), shape[1] // 2
    start = START.repeat(shape[0], 1)
    rows = cross_entropy_op(logits, target, start, 0, softcap)
    for got in (
        cross_entropy_reference(logits, target, start, 0, softcap),
        cross_entropy_op(
            logits[:, half:],
            target,
            cross_entropy_op(logits[:, :half], target, start, 0, softcap),
            half,
            softcap,
        ),
    ):
        ind.assert_same_bits(got[:, 0::2].contiguous(), rows[:, 0::2].contiguous())
        assert_close(got[:, 1::2], rows[:, 1::2].double(), 1e-5 * (1 + logits.abs().sum()))
    if min(shape) > 0:
        x = capped(logits, softcap)
        assert_close(rows[:, 0] + rows[:, 1].log(), x.logsumexp(1), 1e-5)
        assert_close(rows[:, 2], x.gather(1, target[:, None])[:, 0], 4e-6)
        assert_close(rows[:, 3], x.sum(1), 1e-5 * (1 + x.abs().sum(1)))


@for_each("layout, shape, softcap, dtype", pairwise(LAYOUTS, SHAPES, CAPS, WIDE))
def test_gradients(
    poisoned: None, layout: Layout, shape: tuple[int, ...], softcap: float, dtype: torch.dtype
) -> None:
    logits, target = inputs(shape)
    logits, weight = layout(logits), normal(shape[:1], torch.float32, seed=2)
    x = logits.detach().double().requires_grad_()
    lse = capped(x, softcap).logsumexp(1)
    how = (0, 3 * max(1, shape[1]), 0.2, 0.01, softcap)
    args = logits, target, lse.detach().float(), weight, *how, dtype
    got = cross_entropy_backward_op(*args)
    op = torch.ops.mixprec.cross_entropy_backward_reference
    ind.assert_same_bits(got, op(*args))
    if min(shape) > 0:
        s = capped(x, softcap)
        loss = lse - 0.8 * s.gather(1, target[:, None])[:, 0] - 0.2 / how[1] * s.sum(1)
        (want,) = torch.autograd.grad(loss + 0.01 * lse.square(), x, weight.double())
        unit = torch.finfo(dtype).eps + 4e-6
        assert_close(got, want, unit * (want.abs() + weight.abs()[:, None] + 1e-5))


def test_infinite_logits_and_rows_without_weight() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.full((5, 100), -inf)
    logits[0, :2] = 1.0
    logits[1, 5], logits[2, 5], logits[4] = inf, nan, nan
    target, start = torch.zeros(5, dtype=torch.int64), START.repeat(5, 1)
    rows = cross_entropy_op(logits, target, start, 0, 0.0)
    want = cross_entropy_reference(logits, target, start, 0, 0.0)
    ind.assert_same_bits(rows, want)
    lse = rows[:, 0] + rows[:, 1].log()
    same = torch.tensor([1 + math.log(2.0), nan, nan, -inf, nan])
    assert torch.allclose(lse, same, rtol=1e-6, equal_nan=True)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    g = cross_entropy_backward_op(logits, target, lse, weight, 0, 100, 0.0, 0.0, 0.0, torch.float32)
    assert torch.allclose(g[0, :3], torch.tensor([-0.5, 0.5, 0.0]))
    assert g[1:4].isnan().any(1).all()
    assert (g[4] == 0).all()
