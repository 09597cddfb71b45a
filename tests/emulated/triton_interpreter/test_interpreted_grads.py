"""unscale_ and grad_stats_ in Triton's interpreter, against the references."""

from __future__ import annotations

import itertools

import independent as ind
import pytest
import torch
from cases import GRADS, SHAPES, WRITABLE, name, normal, padded_rows, permuted, random_bits
from emulated.ops import launcher, reference
from emulated.triton_interpreter.helpers import INF, NAN, agree, f32, no_warnings

from mixprec.triton_kernels import grad_stats

pytestmark = no_warnings
# The interpreter takes 5 to 10 ms a launch: every shape once, and with every value only these.
FEW = ((), (0,), (33,), (13, 17), (4097,))
every_dtype = pytest.mark.parametrize("dtype", GRADS, ids=name)


def grads_of(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = FEW) -> list[torch.Tensor]:
    return [normal(shape, dtype) for shape in shapes]


def counts_of(grads: list[torch.Tensor]) -> torch.Tensor:
    """To be overwritten."""
    return torch.full((len(grads), 4), -7)


@every_dtype
def test_unscale(dtype: torch.dtype) -> None:
    """And found_inf is never cleared."""
    grads = [*grads_of(dtype), random_bits(10_000, dtype)]
    for i, inv_scale in enumerate((1.0, 2.0**-16, 0.3, 2.0**100, 0.0, INF, NAN)):
        for counts in (None, counts_of(grads)):
            agree("unscale_", lambda c=counts, s=inv_scale, found=2.0 * (i == 1): [
                [g.clone() for g in grads], f32(s), f32(found), None if c is None else c.clone()
            ])  # fmt: skip
    shapes = (*SHAPES, (4096,))
    counts = torch.zeros((len(shapes), 4), dtype=torch.int64)
    agree("unscale_", lambda: [grads_of(dtype, shapes), f32(2.0**-3), f32(2.0), counts])


def test_unscale_layouts() -> None:
    for layout, dtype in itertools.product(WRITABLE, (torch.float16, torch.float64)):
        agree("unscale_", lambda layout=layout, dtype=dtype: [
            [layout(normal((13, 17), dtype))], f32(0.3), torch.zeros(1), torch.ones(1, 4).long()
        ])  # fmt: skip
    around = padded_rows(torch.ones(4, 5))
    wide = around.as_strided((4, 8), (8, 1), 0)
    launcher("unscale_")([around], f32(0.5), f32(0.0), None)
    assert (around == 0.5).all()
    assert wide[:, [0, 6, 7]].isnan().all(), "written beside the gradient"


@pytest.mark.parametrize("op", ["unscale_", "grad_stats_"])
@every_dtype
def test_found_inf_at_every_end(op: str, dtype: torch.dtype) -> None:
    """At the first and last element of the first and last tensor; and where the product alone
    overflows."""
    for value, which, at in itertools.product((-INF, NAN, "overflow"), (0, -1), (0, -1)):
        overflow = value == "overflow"
        grads = [normal((n,), dtype) for n in (33, 4099)]
        grads[which][at] = torch.finfo(dtype).max if overflow else value
        found = torch.zeros(1)
        rest = [found, None] if op == "unscale_" else [found, torch.zeros(2).double(), None]
        # the sum of squares sees the FP32 product, the write-back its rounding to 16 bits
        expected = op == "unscale_" or not overflow or dtype != torch.float16
        launcher(op)(grads, f32(4.0 if overflow else 0.5), *rest)
        assert found.item() == float(expected), (value, which, at)


@pytest.mark.parametrize("inv_scale", [None, 0.3])
@every_dtype
def test_grad_stats(dtype: torch.dtype, inv_scale: float | None) -> None:
    """One sum per gradient, the same in two runs."""
    chunk = grad_stats.BLOCK * grad_stats.ROUNDS
    grads = [*grads_of(dtype), normal((3 * chunk + 1,), dtype), permuted(normal((5, 7), dtype))]
    scale = None if inv_scale is None else f32(inv_scale)
    sums = []
    for _ in range(2):
        found, sum_sq = f32(0.0), torch.full((len(grads),), NAN, dtype=torch.float64)
        launcher("grad_stats_")(grads, scale, found, sum_sq, None)
        sums.append(sum_sq.tolist())
        assert found.item() == 0.0
    assert sums[0] == sums[1], "two runs, two results"
    for grad, total in zip(grads, sums[0], strict=True):
        want = ind.sum_of_squares([grad], inv_scale)
        assert abs(total - want) <= 1e-13 * want  # FP64 partial sums of 1e5 terms


def agree_on_counts(grads: list[torch.Tensor], inv_scale: float | None) -> list[list[int]]:
    """The counts, and found_inf, of the kernel and of the reference."""
    scale = None if inv_scale is None else f32(inv_scale)
    results = []
    for run in (launcher("grad_stats_"), reference("grad_stats_")):
        found, sum_sq, counts = f32(0.0), torch.zeros(len(grads)).double(), counts_of(grads)
        run(grads, scale, found, sum_sq, counts)
        results.append((found.item(), counts.tolist()))
    assert results[0] == results[1]
    return results[0][1]


@every_dtype
def test_grad_stats_counts(dtype: torch.dtype) -> None:
    patterns = [random_bits(3000, dtype), padded_rows(random_bits(15, dtype))]
    agree_on_counts([*grads_of(dtype), *patterns], 0.3)
    agree_on_counts(patterns, 1e30)
    # more than a chunk of one kind: no count runs over into the next
    size = grad_stats.BLOCK * grad_stats.ROUNDS + 5
    values = (-INF, NAN, -0.0, torch.finfo(dtype).smallest_normal / 2)
    counts = agree_on_counts([torch.full((size,), x, dtype=dtype) for x in values], None)
    assert counts == [[size * (i == k) for k in range(4)] for i in range(4)]


def test_grad_stats_of_nothing_and_of_much() -> None:
    run = launcher("grad_stats_")
    found = f32(0.0)
    run([], None, found, torch.zeros(0).double(), torch.zeros((0, 4)).long())
    # the square of each of 70 overflows FP32
    grads = [torch.empty(0), torch.full((70,), 3e38)]
    sum_sq = torch.full((2,), 7.0, dtype=torch.float64)
    run(grads, f32(1.0), found, sum_sq, None)
    assert found.item() == 0.0
    assert sum_sq.tolist() == [0.0, pytest.approx(70 * 9e76, rel=1e-6)]
    run([torch.empty(0), f32(1.0, INF)], None, found, sum_sq, None)
    assert (sum_sq.tolist(), found.item()) == ([0.0, INF], 1.0)
