"""The kernels of csrc/cuda, compiled with g++ and run on the CPU, bit for bit the references.

What this does not show: the GPU's own memory model, its speed, and that nvcc compiles the same.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import independent as ind
import pytest
import torch
from cases import FP8, GRADS, WIDE, name, normal, random_bits
from cuda_on_cpu import runner

from mixprec.ops._dispatch.rounding import split_master
from mixprec.ops.adamw import adamw_reference_
from mixprec.ops.amax import amax_reference
from mixprec.ops.dequantize import dequantize_reference
from mixprec.ops.grad_stats import grad_stats_reference_
from mixprec.ops.quantize import quantize_reference
from mixprec.ops.scale import (
    clip_coef_reference,
    inv_scale_reference,
    scale_from_amax_reference_,
    update_scale_reference_,
)
from mixprec.ops.sgd import sgd_reference_
from mixprec.ops.unscale import unscale_reference_

LOW = (*FP8, torch.float16, torch.bfloat16)
CHUNK = 32768  # csrc/cuda/common/tensor_list.cuh
# Empty, one, primes, around the packs (4 to 16), the tiles (64, 128) and the chunks.
SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 127, 128, 129, 1009, CHUNK - 1, CHUNK, CHUNK + 1)
LONG = 3 * CHUNK + 5
SHAPES = (
    *((0, 5), (5, 0), (1, 1), (1, 129), (131, 1), (7, 13), (16, 16), (64, 64), (63, 65)),
    *((128, 128), (2, 3, 48), (130, 272), (257, 129)),
)


@pytest.fixture(autouse=True)
def _order() -> None:
    """The order of blocks and threads: random, the same in every run."""
    runner.seed(1)


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


def at_offset(x: torch.Tensor, by: int) -> torch.Tensor:
    """x, `by` elements after a 16-byte boundary and between NaN."""
    result = runner.misaligned(x.shape, x.dtype, by)
    return result.copy_(x)


def gradients(dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    sizes = (*SIZES, LONG if offset == 0 else 41)
    return [at_offset(normal((n,), dtype, seed=n), offset) for n in sizes]


def assert_lists(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        ind.assert_same_bits(one, two, f"{what}[{i}]")


def no_counts(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.full((len(grads), 4), -7)


def check_unscale(grads: list[torch.Tensor], inv_scale: float, flag: float = 0.0) -> float:
    """Returns found_inf. With counts and without, the gradients are the same."""
    want, plain = [g.clone() for g in grads], [g.clone() for g in grads]
    flags, wanted = [torch.tensor(flag) for _ in range(2)], torch.tensor(flag)
    counts, wanted_counts = no_counts(grads), no_counts(grads)
    runner.unscale_(grads, torch.tensor(inv_scale), flags[0], counts)
    runner.unscale_(plain, torch.tensor(inv_scale), flags[1], None, sms=1)
    unscale_reference_(want, torch.tensor(inv_scale), wanted, wanted_counts)
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
    grad_stats_reference_(grads, inv, wanted_inf, wanted, wanted_counts)
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
def test_one_bad_element_anywhere_raises_the_flag(bad: float) -> None:
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
                ind.assert_same_bits(runner.amax(x), amax_reference(x), f"amax of {n}")


PARTS = ("data", "data_t", "scale_inv", "scale_inv_t", "amax")
BLOCKS = ("row", "block1x128", "block128x128")


def check_quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: float | None, transpose: bool, offset: int = 0,
    power_of_two_scale: bool = True, granularity: str = "tensor", sms: int = 2,
) -> None:  # fmt: skip
    given = None if scale is None else torch.tensor(scale)
    args = (x, dtype, given, transpose, granularity, power_of_two_scale)
    got, want = runner.quantize(*args, offset=offset, sms=sms), quantize_reference(*args)
    for part, one, two in zip(PARTS, got, want, strict=True):
        ind.assert_same_bits(one, two, f"{part} of {tuple(x.shape)} by {granularity}")


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        x = normal(shape, x_dtype, seed=i)
        for transpose in (False, True):
            check_quantize(x, dtype, None, transpose)
            check_quantize(x, dtype, 3.0, transpose)
            check_quantize(x, dtype, 0.0, transpose)  # not initialised
        # Input and output on boundaries or not, each on its own.
        check_quantize(at_offset(x, 1), dtype, 0.5, i % 2 == 0)
        check_quantize(x, dtype, None, i % 2 == 1, offset=1, power_of_two_scale=False)
    for n in (CHUNK + 1, LONG):  # several turns of each block
        check_quantize(at_offset(normal((n,), x_dtype), 2), dtype, None, False)


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_of_any_bits(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    every = random_bits(1 << 14, x_dtype).view(128, 128)
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=x_dtype))
    for scale in (None, 1.0, 2.0**-20, 2.0**100):
        check_quantize(every, dtype, scale, True)
        check_quantize(finite, dtype, scale, False)


# Long rows take a block each, short ones a warp; several tiles in both directions.
BLOCK_SHAPES = (*SHAPES, (9,), (), (11, 1040), (3, 2049))


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_by_blocks(x_dtype: torch.dtype, dtype: torch.dtype, granularity: str) -> None:
    for i, shape in enumerate(BLOCK_SHAPES):
        x = normal(shape, x_dtype, seed=i)
        if x.dim():
            x = x * torch.logspace(-9, 9, shape[-1], base=2).to(x_dtype)
        for transpose in (False, True) if x.dim() > 1 else (False,):
            check_quantize(x, dtype, None, transpose, granularity=granularity)
        moved, transpose = at_offset(x, 1), x.dim() > 1 and i % 2 == 0
        check_quantize(moved, dtype, None, transpose, 0, False, granularity, sms=1)
        check_quantize(x, dtype, None, x.dim() > 1, 1, i % 2 == 1, granularity)


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_by_blocks_of_any_bits(x_dtype: torch.dtype, granularity: str) -> None:
    every = random_bits(130 * 272, x_dtype).view(130, 272)
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=x_dtype))
    finite[:, 5] = finite[7] = finite[:128, :128] = 0
    for x in (every, finite):
        for dtype in FP8:
            check_quantize(x, dtype, None, True, granularity=granularity)
            check_quantize(x, dtype, None, False, 0, False, granularity)


@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("data_dtype", LOW, ids=name)
def test_dequantize(data_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for n in (*SIZES, LONG):
        data = random_bits(n, data_dtype, seed=n)
        for offset, out_offset in ((0, 0), (0, 1), (1, 1)):
            moved, scale_inv = at_offset(data, offset), torch.tensor(0.3)
            got = runner.dequantize(moved, scale_inv, dtype, offset=out_offset)
            ind.assert_same_bits(got, dequantize_reference(data, scale_inv, dtype), f"of {n}")


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("data_dtype", LOW, ids=name)
def test_dequantize_by_blocks(
    data_dtype: torch.dtype, dtype: torch.dtype, granularity: str
) -> None:
    for i, shape in enumerate((*BLOCK_SHAPES, (257, 400))):
        data = normal(shape, torch.float32, seed=i).to(data_dtype)
        rows, cols = granularity.as_matrix(data.shape)
        scales = normal(granularity.scale_shape(granularity, rows, cols), torch.float32).abs()
        for offset, out_offset in ((0, 0), (0, 1), (1, 1)):
            for scale_inv in (scales, scales.t().contiguous().t()):
                got = runner.dequantize(
                    at_offset(data, offset), scale_inv, dtype, offset=out_offset
                )
                want = dequantize_reference(data, scale_inv, dtype)
                ind.assert_same_bits(got, want, f"of {shape} by {granularity}")


Lists = list[list[torch.Tensor]]  # params, grads, states, masters
Mix = tuple[torch.dtype, torch.dtype, tuple[torch.dtype, ...], torch.dtype | None]
SEED = (1 << 62) + 12345
ADAMW = {
    "decoupled": (adamw_reference_, runner.adamw_, 2, (1e-3, 0.9, 0.999, 1e-8, 1e-2, True)),
    "l2": (adamw_reference_, runner.adamw_, 2, (1e-2, 0.8, 0.99, 1e-6, 0.1, False)),
}
SGD = {
    "sgd": (sgd_reference_, runner.sgd_, 0, (0.1, 0.0, 0.0, 0.01, False)),
    "momentum": (sgd_reference_, runner.sgd_, 1, (0.1, 0.9, 0.1, 0.0, False)),
    "nesterov": (sgd_reference_, runner.sgd_, 1, (0.1, 0.9, 0.0, 0.01, True)),
}
RULES = ADAMW | SGD


def mixes(states: int, masters: bool) -> list[Mix]:
    """All formats that one list may hold."""
    narrow = (torch.float32, torch.bfloat16)
    kinds = {0: [()], 1: [(m,) for m in narrow], 2: [(m, v) for m in narrow for v in narrow]}
    found: list[Mix] = []
    for param in WIDE:
        remainder = [torch.int16] if param == torch.bfloat16 else []
        for master in [torch.float32, *remainder] if masters else [None]:
            found += [(param, grad, s, master) for grad in WIDE for s in kinds[states]]
    wide = torch.float64
    return [*found, (wide, wide, (wide,) * states, wide if masters else None)]


def step_lists(rows: list[tuple[int, Mix]], offsets: tuple[int, ...]) -> Lists:
    """One tensor per size and mix; each array starts at an offset of its own."""
    rng = random.Random(len(rows))
    states = len(rows[0][1][2])
    params, grads, masters = [], [], []
    moments: Lists = [[] for _ in range(states)]
    for i, (n, (param, grad, state, master)) in enumerate(rows):
        real = torch.float64 if param == torch.float64 else torch.float32
        truth = normal((n,), real, seed=i)
        low, remainder = truth.to(param), truth
        if master == torch.int16:
            low, remainder = split_master(truth)
        arrays = [low, normal((n,), grad, seed=i + 1)]
        arrays += [normal((n,), real, seed=i + 2 + k).abs().to(t) for k, t in enumerate(state)]
        arrays += [] if master is None else [remainder]
        moved = [at_offset(t, rng.choice(offsets)) for t in arrays]
        params.append(moved[0])
        grads.append(moved[1])
        for k in range(states):
            moments[k].append(moved[2 + k])
        masters.extend([] if master is None else moved[-1:])
    return [params, grads, *moments, masters]


def assert_same(got: Lists, want: Lists, what: str) -> None:
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            label = f"{what}: array {k} of tensor {i}, {one.dtype}"
            if one.dtype == torch.int16:
                assert torch.equal(one, two), label
            else:
                ind.assert_same_bits(one, two, label)


def check_step(
    rule: str, lists: Lists, *, maximize: bool = False, max_value: float = float("inf"),
    stochastic: bool = False, seed: int = SEED, lr_tensor: torch.Tensor | None = None,
    random_rounding: bool = True, sms: int = 2, **scalars: float,
) -> None:  # fmt: skip
    """One step of the kernels and of the reference, which agree in every bit."""
    reference, ours, _, settings = RULES[rule]
    if rule == "sgd":
        lists = [*lists[:2], [], lists[-1]]
    n = len(lists[0])
    steps = torch.tensor([(0.0, 1.0, 7.0, 999.0, 2.0**24)[i % 5] for i in range(n)])
    indices = [(7 * i + (1 << 29)) % (1 << 30) for i in range(n)] if random_rounding else []
    given = [torch.tensor(scalars[k]) if k in scalars else None for k in ("inv_scale", "clip")]
    found_inf = torch.tensor(scalars["found_inf"]) if "found_inf" in scalars else None
    tail = (maximize, max_value, stochastic, seed, indices, lr_tensor, *given, found_inf)
    want, wanted_steps = [[t.clone() for t in ts] for ts in lists], steps.clone()
    ours(*lists, steps, *settings, *tail, sms=sms)
    reference(*want, wanted_steps, *settings, *tail)
    assert_same(lists, want, rule)
    assert torch.equal(steps, wanted_steps)


def every_mix(rule: str, masters: bool, offsets: tuple[int, ...]) -> Lists:
    sizes = (0, 1, 5, 8, 19, 64)
    found = mixes(RULES[rule][2], masters)
    return step_lists([(n, mix) for mix in found for n in sizes], offsets)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_step_of_every_mix_in_one_list(rule: str, masters: bool) -> None:
    for offsets in ((0,), (0, 1, 3, 8)):
        lists = every_mix(rule, masters, offsets)
        check_step(rule, lists, stochastic=True)
        check_step(rule, lists, maximize=True, inv_scale=2.0**-3, clip=0.7, max_value=0.3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=name)
def test_step_over_chunks(rule: str, state: torch.dtype) -> None:
    states = (state,) * RULES[rule][2]
    bf16 = torch.bfloat16
    all_mixes: list[list[Mix]] = [
        [(bf16, bf16, states, None), (torch.float32, torch.float16, states, None)],
        [(bf16, torch.float32, states, torch.int16), (torch.float16, bf16, states, torch.float32)],
    ]
    for found in all_mixes:
        rows = [(n, mix) for n in (CHUNK - 1, CHUNK, 17, 2 * CHUNK + 13) for mix in found]
        for seed, offsets in ((2, (0,)), (3, (0, 3))):
            runner.seed(seed)
            lists = step_lists(rows, offsets)
            check_step(rule, lists, stochastic=True, seed=0, sms=seed, inv_scale=0.5)


@pytest.mark.parametrize("rule", RULES)
def test_step_gives_the_same_bits_in_any_order(rule: str) -> None:
    lists = every_mix(rule, False, (0, 1))
    for seed in range(3):
        runner.seed(seed)
        copies = [[t.clone() for t in ts] for ts in lists]
        check_step(rule, copies, stochastic=True, sms=1 + 3 * seed)


@pytest.mark.parametrize("flag", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("rule", RULES)
def test_step_changes_nothing_after_an_overflow(rule: str, flag: float) -> None:
    for masters in (False, True):
        lists = every_mix(rule, masters, (0, 3))
        before = [[t.clone() for t in ts] for ts in lists]
        check_step(rule, lists, inv_scale=0.5, clip=0.5, found_inf=flag, stochastic=True)
        assert_same(lists, before, "after a skipped step")


@pytest.mark.parametrize("rule", RULES)
def test_step_with_lr_on_the_device(rule: str) -> None:
    for lr in (torch.tensor(0.3), torch.tensor([1 / 3], dtype=torch.float64)):
        check_step(rule, every_mix(rule, True, (0,)), lr_tensor=lr, found_inf=0.0)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_step_of_any_bits(rule: str, masters: bool) -> None:
    lists = step_lists([(4096, mix) for mix in mixes(RULES[rule][2], masters)[:-1]], (0,))
    for k, tensors in enumerate(lists):
        for i, t in enumerate(tensors):
            if t.dtype != torch.int16:
                t.copy_(random_bits(t.numel(), t.dtype, seed=100 * k + i))
                t[::3] = normal((t[::3].numel(),), t.dtype, seed=i)
            else:
                t.random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(i))
    check_step(rule, lists, stochastic=True, max_value=1e30)


@pytest.mark.parametrize("rule", RULES)
def test_step_of_a_long_list(rule: str) -> None:
    found = mixes(RULES[rule][2], True)
    rows = [(i % 3, found[i % len(found)]) for i in range(1700)]
    assert sum(n > 0 and mix[0] != torch.float64 for n, mix in rows) > 2 * (32764 // 64)
    check_step(rule, step_lists(rows, (0,)), inv_scale=0.25)


def test_step_without_indices_where_nothing_is_random() -> None:
    for rule, moments in (("decoupled", 2), ("nesterov", 1), ("sgd", 0)):
        mix: Mix = (torch.bfloat16, torch.bfloat16, (torch.float32,) * moments, torch.float32)
        check_step(rule, step_lists([(33, mix), (0, mix)], (0,)), random_rounding=False)
    check_step("sgd", [[], [], []], random_rounding=False)


AMAXES = (0.0, 1e-45, 2.0**-126, 1e-3, 1.0, 3.0, 448.0, 3e38, float("inf"), float("nan"))


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_scale_from_amax(dtype: torch.dtype) -> None:
    some = torch.tensor(AMAXES)
    for amax in (some, some[:0], normal((1000,), torch.float32).abs()):
        for margin, power_of_two in ((0, True), (3, False), (-64, True), (64, False)):
            got, want = [(torch.full_like(amax, 5.0), torch.zeros_like(amax)) for _ in range(2)]
            runner.scale_from_amax_(*got, amax, dtype, margin, power_of_two)
            scale_from_amax_reference_(*want, amax, dtype, margin, power_of_two)
            assert_lists(list(got), list(want), f"scale, scale_inv at margin {margin}")


def test_inv_scale() -> None:
    for scale in (*random_bits(200, torch.float32), torch.tensor([65536.0]), torch.tensor(0.0)):
        ind.assert_same_bits(runner.inv_scale(scale), inv_scale_reference(scale), f"1 / {scale}")


def test_clip_coef() -> None:
    for count in (0, 1, 3, 255, 256, 257, 5000):
        sum_sq = (torch.arange(count) % 37 * 3).double()  # whole numbers: the order is no matter
        for max_norm in (1e-30, 0.1, 1.0, 77.7, 1e30, float("inf")):
            want = clip_coef_reference(sum_sq, max_norm)
            ind.assert_same_bits(runner.clip_coef(sum_sq, max_norm), want, f"of {count}")
    for bad in (float("inf"), float("nan"), -1.0):
        sum_sq = torch.tensor([1.0, bad], dtype=torch.float64)
        ind.assert_same_bits(runner.clip_coef(sum_sq, 1.0), clip_coef_reference(sum_sq, 1.0), "bad")


def test_clip_coef_adds_in_one_order() -> None:
    sum_sq = normal((3001,), torch.float64).square()
    results = []
    for seed in range(4):
        runner.seed(seed)
        results.append(runner.clip_coef(sum_sq, 1.0).item())
    assert len(set(results)) == 1
    assert abs(results[0] / clip_coef_reference(sum_sq, 1.0).item() - 1) <= 2.0**-23


@pytest.mark.parametrize("start", [2.0**-24, 1.0, 65536.0, 2.0**127, 0.3])
def test_update_scale(start: float) -> None:
    rng = random.Random(start)
    for rule in (
        (2.0, 0.5, 3, 2.0**-24, float("inf"), 1, 1.0),
        (1.7, 0.3, 40, 0.0, 1e5, 2, 0.1),
        (1.0, 1.0, 1, 4.0, 2.0, 3, 0.0),
    ):
        state = [torch.tensor(start), *(torch.tensor(n, dtype=torch.int32) for n in (2, rule[5]))]
        state.append(torch.tensor([5, 1 << 40, 2]))
        want = [t.clone() for t in state]
        for _ in range(60):
            found = torch.tensor(rng.choice((0.0, 0.0, 0.0, 1.0, 2.0, float("nan"))))
            underflow = rng.choice((None, torch.tensor(0.1), torch.tensor([0.5])))
            runner.update_scale_(*state, found, underflow, *rule)
            update_scale_reference_(*want, found, underflow, *rule)
            ind.assert_same_bits(state[0], want[0], "scale")
            assert [t.tolist() for t in state[1:]] == [t.tolist() for t in want[1:]]


# cuda_on_cpu/sanitized.cpp under the sanitizers, and without any one barrier of a kernel.

BARRIER = re.compile(r"__syncthreads\(\);")


def skip_without(sanitizer: str, folder: Path) -> None:
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}")
    flags = [f"-fsanitize={sanitizer}", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(["g++", *flags], capture_output=True).returncode != 0:
        pytest.skip(
            f"this g++ cannot link -fsanitize={sanitizer} (its run-time library is missing)"
        )
    ran = subprocess.run([folder / "probe"], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run on this machine: {ran.stderr[-300:]}")


def sanitized(sanitizer: str, csrc: Path = runner.CSRC) -> subprocess.CompletedProcess[str]:
    """Returns 0, 1 where a value is wrong, 66 where the sanitizer has found something."""
    scheduler = runner.compile_(["-O1", "-c", runner.SCHEDULER], ".o")
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    program = runner.compile_(
        ["-O1", "-g", *checks, scheduler, runner.HERE / "sanitized.cpp"], ".sanitized", csrc
    )
    options = "exitcode=66 halt_on_error=1"
    names = ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    env = os.environ | dict.fromkeys(names, options)
    return subprocess.run([program], capture_output=True, text=True, env=env, timeout=120)


def test_the_kernels_stay_in_their_memory_and_aligned(tmp_path: Path) -> None:
    skip_without("address,undefined", tmp_path)
    done = sanitized("address,undefined")
    assert done.returncode == 0, done.stdout + done.stderr


def without_one_barrier(folder: Path) -> list[tuple[str, Path]]:
    mutants = []
    for kernel in sorted((runner.CSRC / "cuda").rglob("*.cuh")):
        if "sm90" in kernel.name:  # run, and mutated, on another model: test_gemm_sm90.py
            continue
        text = kernel.read_text()
        for match in BARRIER.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            copy = folder / f"{kernel.stem}-{line}"
            shutil.copytree(runner.CSRC, copy, ignore=shutil.ignore_patterns("*.cpp", "*.cu"))
            mutated = text[: match.start()] + ";" + text[match.end() :]
            (copy / kernel.relative_to(runner.CSRC)).write_text(mutated)
            mutants.append((f"{kernel.name}:{line}", copy))
    return mutants


def test_every_barrier_is_needed_and_none_is_missing(tmp_path: Path) -> None:
    skip_without("thread", tmp_path)
    whole = sanitized("thread")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    mutants = without_one_barrier(tmp_path)
    assert len(mutants) >= 4, "no barriers found in csrc/cuda"
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda mutant: sanitized("thread", mutant[1]), mutants))
    for (where, _), result in zip(mutants, results, strict=True):
        assert result.returncode in (1, 66), f"{where}: nothing tells that its barrier is gone"
