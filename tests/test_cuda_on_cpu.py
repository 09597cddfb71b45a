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

from mixprec.ops.adamw import adamw_reference_
from mixprec.ops.amax import amax_reference
from mixprec.ops.dequantize import dequantize_reference
from mixprec.ops.grad_stats import grad_stats_reference_
from mixprec.ops.quantize import quantize_reference
from mixprec.ops.unscale import unscale_reference_

LOW = (*FP8, torch.float16, torch.bfloat16)
CHUNK = 32768  # csrc/cuda/tensor_list.cuh
# Empty, one, primes, around the packs (4 to 16), the tiles (64, 128) and the chunks.
SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 127, 128, 129, 1009, CHUNK - 1, CHUNK, CHUNK + 1)
LONG = 3 * CHUNK + 5
SHAPES = (
    *((0, 5), (5, 0), (1, 1), (1, 129), (131, 1), (7, 13), (16, 16), (64, 64), (63, 65)),
    *((128, 128), (2, 3, 48), (130, 272), (257, 129)),
)
HYPER = (1e-3, 0.9, 0.999, 1e-8, 1e-2)


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


def check_unscale(grads: list[torch.Tensor], inv_scale: float, flag: float = 0.0) -> float:
    want = [g.clone() for g in grads]
    found_inf, wanted = torch.tensor(flag), torch.tensor(flag)
    runner.unscale_(grads, torch.tensor(inv_scale), found_inf)
    unscale_reference_(want, torch.tensor(inv_scale), wanted)
    assert_lists(grads, want, "grads")
    assert found_inf.item() == wanted.item()
    return found_inf.item()


def check_stats(grads: list[torch.Tensor], inv_scale: float | None) -> float:
    """Returns found_inf; two runs with other orders, on GPUs of other sizes, have the same bits."""
    inv = None if inv_scale is None else torch.tensor(inv_scale)
    results = []
    for sms in (1, 7):
        found_inf, sum_sq = torch.tensor(0.0), torch.tensor(-7.0, dtype=torch.float64)
        runner.grad_stats_(grads, inv, found_inf, sum_sq, sms)
        results.append((found_inf, sum_sq))
    wanted_inf, wanted = torch.tensor(0.0), torch.tensor(-7.0, dtype=torch.float64)
    grad_stats_reference_(grads, inv, wanted_inf, wanted)
    ind.assert_same_bits(results[0][1], results[1][1], "sum_sq of two runs")
    assert results[0][0].item() == results[1][0].item() == wanted_inf.item()
    if wanted.isfinite():
        one, two = results[0][1].item(), wanted.item()
        assert abs(one - two) <= 2.0**-24 * two, f"sum_sq {one}, expected {two}"  # half an ulp
    else:
        assert not results[0][1].isfinite()
    return wanted_inf.item()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_and_grad_stats(dtype: torch.dtype, offset: int) -> None:
    grads = gradients(dtype, offset)
    before = [g.clone() for g in grads]
    assert check_stats(grads, None) == check_stats(grads, 0.3) == 0.0
    assert_lists(grads, before, "grad_stats_ wrote to grads")
    assert check_unscale(grads, 0.3) == 0.0


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_and_grad_stats_of_any_bits(dtype: torch.dtype) -> None:
    every = random_bits(1 << 14, dtype)
    finite = every[every.isfinite()].contiguous()
    for inv_scale in (1.0, 2.0**-16, 2.0**24, 1 / 3, 0.0):
        check_stats([finite], inv_scale)
        check_unscale([finite.clone()], inv_scale)
    assert check_stats([every], 0.5) == check_unscale([every], 0.5, flag=1.0) == 1.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_anywhere_raises_the_flag(bad: float) -> None:
    for tensor, element in ((0, 0), (0, -1), (-1, 0), (-1, -1), (1, 17)):
        grads = [normal((n,), d, seed=n) for n, d in zip((33, 40, 1009), WIDE, strict=True)]
        grads[tensor][element] = bad
        assert check_stats(grads, 2.0) == 1.0
        assert check_unscale(grads, 2.0) == 1.0


def test_lists_longer_than_one_launch() -> None:
    rng = random.Random(0)
    grads = [normal((rng.choice((0, 1, 2, 5)),), torch.float32, seed=i) for i in range(2000)]
    grads += [normal((3,), rng.choice(GRADS), seed=i) for i in range(40)]
    assert sum(g.numel() > 0 and g.dtype == torch.float32 for g in grads) > 32764 // 24
    assert check_stats(grads, 0.5) == check_unscale(grads, 0.5) == 0.0


def test_an_empty_list_has_the_sum_zero() -> None:
    assert check_stats([], None) == check_stats([torch.zeros(0)], 0.5) == 0.0
    assert check_unscale([], 1.0, flag=1.0) == 1.0


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_amax(dtype: torch.dtype) -> None:
    for n in (*SIZES, LONG):
        for offset in (0, 1):
            x = at_offset(normal((n,), dtype, seed=n), offset)
            for bad in (None, float("-inf"), float("nan")):
                if bad is not None and n > 0:
                    x[n // 2] = bad
                ind.assert_same_bits(runner.amax(x), amax_reference(x), f"amax of {n}")


def check_quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: float | None, transpose: bool, offset: int = 0,
    power_of_two_scale: bool = True,
) -> None:  # fmt: skip
    given = None if scale is None else torch.tensor(scale)
    args = (x, dtype, given, transpose, power_of_two_scale)
    got, want = runner.quantize(*args, offset=offset), quantize_reference(*args)
    for part, one, two in zip(("data", "data_t", "scale_inv", "amax"), got, want, strict=True):
        ind.assert_same_bits(one, two, f"{part} of {tuple(x.shape)}")


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        x = normal(shape, x_dtype, seed=i)
        for transpose in (False, True):
            check_quantize(x, dtype, None, transpose)
            check_quantize(x, dtype, 3.0, transpose)
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


@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("data_dtype", LOW, ids=name)
def test_dequantize(data_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for n in (*SIZES, LONG):
        data = random_bits(n, data_dtype, seed=n)
        for offset, out_offset in ((0, 0), (0, 1), (1, 1)):
            moved, scale_inv = at_offset(data, offset), torch.tensor(0.3)
            got = runner.dequantize(moved, scale_inv, dtype, offset=out_offset)
            ind.assert_same_bits(got, dequantize_reference(data, scale_inv, dtype), f"of {n}")


Lists = list[list[torch.Tensor]]


def adamw_lists(
    sizes: tuple[int, ...], param: torch.dtype, grad: torch.dtype, master: bool, offset: int = 0
) -> Lists:
    """params, grads, exp_avgs, exp_avg_sqs, masters, steps; only the params are at `offset`."""
    real = torch.float64 if param == torch.float64 else torch.float32
    lists: Lists = [[], [], [], [], [], []]
    for i, n in enumerate(sizes):
        truth = normal((n,), real, seed=i)
        lists[0].append(at_offset(truth.to(param), offset))
        lists[1].append(normal((n,), grad, seed=i + 1))
        lists[2].append(normal((n,), real, seed=i + 2))
        lists[3].append(normal((n,), real, seed=i + 3).square())
        lists[4].extend([truth] if master else [])
        lists[5].append(torch.tensor(float(i % 5)))
    return lists


def check_adamw(lists: Lists, maximize: bool = False, **scalars: float) -> None:
    # Steps that are one tensor stay one tensor.
    memo: dict[int, torch.Tensor] = {}
    want = [[memo.setdefault(t.data_ptr() or id(t), t.clone()) for t in ts] for ts in lists]
    names = ("inv_scale", "clip", "found_inf")
    given = [torch.tensor(scalars[n]) if n in scalars else None for n in names]
    runner.adamw_(*lists, *HYPER, maximize, *given)
    adamw_reference_(*want, *HYPER, maximize, *given)
    labels = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "steps")
    for label, one, two in zip(labels, lists, want, strict=True):
        assert_lists(one, two, label)


MIXES = [(p, g, m) for p in WIDE for g in WIDE for m in (False, True)]
MIXES += [(torch.float64, torch.float64, m) for m in (False, True)]


@pytest.mark.parametrize(("param", "grad", "master"), MIXES, ids=name)
def test_adamw(param: torch.dtype, grad: torch.dtype, master: bool) -> None:
    lists = adamw_lists(SIZES, param, grad, master)
    check_adamw(lists)
    check_adamw(lists, inv_scale=2.0**-9, clip=0.7, found_inf=0.0, maximize=True)
    check_adamw(adamw_lists((*SIZES[:-3], 2 * CHUNK + 3), param, grad, master, offset=1))


@pytest.mark.parametrize("flag", [1.0, 2.0, float("nan")])
def test_adamw_changes_nothing_after_an_overflow(flag: float) -> None:
    lists = adamw_lists(SIZES, torch.bfloat16, torch.bfloat16, True)
    before = [[t.clone() for t in ts] for ts in lists]
    check_adamw(lists, inv_scale=0.5, clip=0.5, found_inf=flag)
    for one, two in zip(lists, before, strict=True):
        assert_lists(one, two, "after a skipped step")


def test_adamw_of_a_long_list_of_mixed_dtypes_with_shared_steps() -> None:
    lists: Lists = [[], [], [], [], [], []]
    for param, grad, _ in MIXES[:-2]:
        for ours, theirs in zip(lists, adamw_lists((1, 2, 3) * 4, param, grad, True), strict=True):
            ours.extend(theirs)
    many = adamw_lists((1,) * 700, torch.float32, torch.float32, True)
    shared = torch.tensor(6.0)
    many[5] = [shared if i % 2 else step for i, step in enumerate(many[5])]
    for ours, theirs in zip(lists, many, strict=True):
        ours.extend(theirs)
    assert len(lists[0]) > 32764 // 56
    check_adamw(lists, inv_scale=0.25)
    assert shared.item() == 7.0


# tests/cuda_on_cpu/sanitized.cpp under the sanitizers, and without any one barrier of a kernel.

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
    for kernel in sorted((runner.CSRC / "cuda").glob("*.cuh")):
        text = kernel.read_text()
        for match in BARRIER.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            copy = folder / f"{kernel.stem}-{line}"
            shutil.copytree(runner.CSRC, copy, ignore=shutil.ignore_patterns("*.cpp", "*.cu"))
            mutated = text[: match.start()] + ";" + text[match.end() :]
            (copy / "cuda" / kernel.name).write_text(mutated)
            mutants.append((f"{kernel.name}:{line}", copy))
    return mutants


def test_every_barrier_is_needed_and_none_is_missing(tmp_path: Path) -> None:
    skip_without("thread", tmp_path)
    whole = sanitized("thread")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    mutants = without_one_barrier(tmp_path)
    assert len(mutants) >= 5, "no barriers found in csrc/cuda"
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda mutant: sanitized("thread", mutant[1]), mutants))
    for (where, _), result in zip(mutants, results, strict=True):
        assert result.returncode in (1, 66), f"{where}: nothing tells that its barrier is gone"
