"""unscale_, grad_stats_ and amax of csrc/cuda on the CPU, bit for bit the references.

They do not show the GPU's own memory model, its speed, or that nvcc compiles the same.
"""

from __future__ import annotations

import ctypes
import random

import independent as ind
import pytest
import torch
from cases import GRADS, WIDE, name, normal, random_bits
from emulated.ops import reference
from emulated.shim import runner
from emulated.shim.helpers import CHUNK, LONG, SIZES, assert_lists, at_offset


def test_the_shim_itself() -> None:
    blocks, threads = 3, 64
    out = torch.full((blocks, threads, 6), -1, dtype=torch.int32)
    assert runner.library().deadlock() == 719  # cudaErrorLaunchFailure, and the next launch works
    assert runner.library().primitives(blocks, threads, ctypes.c_void_p(out.data_ptr())) == 0
    for t in range(threads):
        lane, first = t % 32, t // 32 * 32
        ballot = sum(1 << i for i in range(32) if (first + i) % 3 == 0)
        signed = ballot - (1 << 32) if ballot >> 31 else ballot
        down = t + 2 if lane < 30 else t
        want = torch.tensor([t ^ 1, threads - 1 - t, down, signed, 1, 0], dtype=torch.int32)
        assert torch.equal(out[:, t], want.expand(blocks, 6)), f"thread {t}: {out[:, t]}"


def gradients(dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    sizes = (*SIZES, LONG if offset == 0 else 41)
    return [at_offset(normal((n,), dtype, seed=n), offset) for n in sizes]


def no_counts(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.full((len(grads), 4), -7)


def check_unscale(grads: list[torch.Tensor], inv_scale: float, flag: float = 0.0) -> float:
    """Returns found_inf. With counts and without, the gradients are the same."""
    want, plain = [g.clone() for g in grads], [g.clone() for g in grads]
    flags, wanted = [torch.tensor(flag) for _ in range(2)], torch.tensor(flag)
    counts, wanted_counts = no_counts(grads), no_counts(grads)
    runner.unscale_(grads, torch.tensor(inv_scale), flags[0], counts)
    runner.unscale_(plain, torch.tensor(inv_scale), flags[1], None, sms=1)
    reference("unscale_")(want, torch.tensor(inv_scale), wanted, wanted_counts)
    assert_lists(grads, want, "grads")
    assert_lists(plain, want, "grads without counts")
    assert flags[0].item() == flags[1].item() == wanted.item()
    assert torch.equal(counts, wanted_counts)
    return wanted.item()


def check_stats(grads: list[torch.Tensor], inv_scale: float | None) -> float:
    """Returns found_inf. Other orders, GPUs of other sizes, with counts or not: the same bits."""
    # A long list is slow enough once.
    runs = ((1, True), (7, True), (2, False)) if len(grads) < 1000 else ((2, True),)
    inv = None if inv_scale is None else torch.tensor(inv_scale)
    wanted_inf, wanted = torch.tensor(0.0), torch.zeros(len(grads), dtype=torch.float64)
    wanted_counts = no_counts(grads)
    reference("grad_stats_")(grads, inv, wanted_inf, wanted, wanted_counts)
    sums = []
    for sms, counting in runs:
        found_inf, sum_sq = torch.tensor(0.0), torch.full_like(wanted, -7.0)
        counts = no_counts(grads)
        runner.grad_stats_(grads, inv, found_inf, sum_sq, counts if counting else None, sms)
        assert found_inf.item() == wanted_inf.item()
        assert torch.equal(counts, wanted_counts if counting else no_counts(grads))
        sums.append(sum_sq)
    for other in sums[1:]:
        ind.assert_same_bits(other, sums[0], "sum_sq of two runs")
    finite = wanted.isfinite()
    error = (sums[0] - wanted)[finite].abs()
    assert (error <= 2.0**-40 * wanted[finite]).all(), f"sum_sq {sums[0]}, expected {wanted}"
    assert not sums[0][~finite].isfinite().any()
    return wanted_inf.item()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_and_grad_stats(dtype: torch.dtype, offset: int) -> None:
    grads = gradients(dtype, offset)
    for i, grad in enumerate(grads):
        grad[i % 3 :: 5] = 0.0  # to be counted, in every chunk
        grad[i % 7 :: 11] = torch.finfo(dtype).smallest_normal / 2
    before = [g.clone() for g in grads]
    assert check_stats(grads, None) == check_stats(grads, 0.3) == 0.0
    assert_lists(grads, before, "grad_stats_ wrote to grads")
    assert check_unscale(grads, 0.3) == 0.0


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_and_grad_stats_of_any_bits(dtype: torch.dtype) -> None:
    every = random_bits(1 << 14, dtype)
    finite = every[every.isfinite()].contiguous()
    for inv_scale in (1.0, 2.0**-16, 2.0**24, 1 / 3, 0.0, float("inf")):
        check_stats([finite], inv_scale)
        check_unscale([finite.clone()], inv_scale)
    lists = [[finite.clone(), every, torch.zeros(0, dtype=dtype), finite.clone()] for _ in range(2)]
    assert check_stats(lists[0], 0.5) == check_unscale(lists[1], 0.5, flag=1.0) == 1.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_anywhere_sets_found_inf(bad: float) -> None:
    for tensor, element in ((0, 0), (0, -1), (-1, 0), (-1, -1), (1, 17)):
        grads = [normal((n,), d, seed=n) for n, d in zip((33, 40, 1009), WIDE, strict=True)]
        grads[tensor][element] = bad
        assert check_stats(grads, 2.0) == 1.0
        assert check_unscale(grads, 2.0) == 1.0


def test_counts_of_whole_chunks() -> None:
    grads = [torch.full((2 * CHUNK + 1,), x) for x in (0.0, 1e-40, float("inf"), float("nan"), 1.0)]
    counts, found_inf = no_counts(grads), torch.tensor(0.0)
    runner.grad_stats_(grads, None, found_inf, torch.zeros(5, dtype=torch.float64), counts)
    all_of = torch.eye(4, dtype=torch.int64) * (2 * CHUNK + 1)
    assert torch.equal(counts[[2, 3, 0, 1]], all_of)
    assert counts[4].tolist() == [0, 0, 0, 0]


def test_lists_longer_than_one_launch() -> None:
    rng = random.Random(0)
    grads = [normal((rng.choice((0, 1, 2, 5, 5)),), torch.float32, seed=i) for i in range(1600)]
    grads += [normal((3,), rng.choice(GRADS), seed=i) for i in range(40)]
    assert sum(g.numel() > 0 and g.dtype == torch.float32 for g in grads) > 32764 // 28
    assert check_stats(grads, 0.5) == check_unscale(grads, 0.5) == 0.0


def test_empty_lists_and_empty_gradients() -> None:
    assert check_stats([], None) == check_stats([torch.zeros(0)] * 3, 0.5) == 0.0
    assert check_unscale([], 1.0, flag=1.0) == check_unscale([torch.zeros(0)], 1.0, flag=1.0) == 1.0


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_amax(dtype: torch.dtype) -> None:
    for n in (*SIZES, LONG):
        for offset in (0, 1):
            x = at_offset(normal((n,), dtype, seed=n), offset)
            for bad in (None, float("-inf"), float("nan")):
                if bad is not None and n > 0:
                    x[n // 2] = bad
                ind.assert_same_bits(runner.amax(x), reference("amax")(x), f"amax of {n}")
