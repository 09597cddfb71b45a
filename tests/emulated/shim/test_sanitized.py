"""The shim's kernels under the sanitizers, and without any one of their barriers.

Calls of them are recorded here; sanitized.cpp repeats them over memory of exactly the right size.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import normal, small_integers
from emulated.agreement import Agreement, reference, tensors
from emulated.shim import runner
from emulated.values.test_updates import KINDS, RULES, arguments, mixes

ODD = 1003  # elements


def calls() -> Iterable[tuple[str, list[Any]]]:
    """Every kernel that has a barrier, with several tiles, rows or chunks for a block (which has
    more than one gradient and, with counts, two reductions in turn); odd sizes and alignments.
    What takes longest comes last: a run without a barrier ends at the first call that needs it."""
    one, e4m3 = torch.tensor(1.0), torch.float8_e4m3fn
    for rows, cols, granularity, transpose, scale in (
        (128, 270, "tensor", True, 2.0), (131, 656, "tensor", True, 0.0),
        (131, 144, "tensor", False, None), (75, 150, "row", False, None),
        (11, 1030, "row", False, None), (131, 656, "row", True, None),
        (131, 656, "block1x128", True, None), (128, 1200, "block1x128", False, None),
        (131, 656, "block128x128", True, None), (128, 1200, "block128x128", False, None),
    ):  # fmt: skip
        x = normal((rows, cols), torch.bfloat16) * torch.logspace(-9, 9, cols, base=2).bfloat16()
        given = None if scale is None else torch.tensor(scale)
        yield "quantize", [x, e4m3, given, transpose, granularity, True]
    wide = normal((131, 656), torch.float32)  # more tiles than blocks
    for fmt, shape, seed in (
        ("mxfp8_e4m3", (131, 656), None), ("mxfp6_e3m2", (7, 75), torch.tensor([5])),
        ("mxfp4", (33, 75), None), ("nvfp4", (131, 656), torch.tensor([5])),
    ):  # fmt: skip
        part = wide[: shape[0], : shape[1]].clone()
        yield "quantize_mx", [part, fmt, "rceil", True, seed, True, seed is None]
        data, _, scale, *_ = reference("quantize_mx")(part, fmt, "rceil", False, seed, False, True)
        yield "dequantize_mx", [data, scale, None, fmt, shape[1], torch.bfloat16]
    x, g = (normal((131, 144), torch.bfloat16, seed=seed) for seed in range(2))
    weight, rows = torch.ones(144), torch.ones(131)
    for granularity, transpose in (("tensor", True), ("row", True), ("block1x128", False),
                                   ("mx", True)):  # fmt: skip
        cast = None, transpose, granularity
        yield "norm_quantize", [x, g, weight, weight, 1e-5, True, e4m3, *cast, True]
        yield "act_backward", [g[:, :70], x[:, :70], x[:, :70], "silu", e4m3, *cast, True]
    yield "act_quantize", [x[:7], None, "gelu", torch.float32, None, False, "tensor", True]
    for granularity in ("tensor", "row"):
        cast = None, False, granularity
        yield "norm_quantize", [x, None, weight, None, 1e-5, False, e4m3, *cast, True]
    yield "norm_backward", [g, x, weight, rows, rows, g, True]
    for shape in ((67, 1024), (4200, 8)):  # by bands; more bands than are added at once
        long = normal(shape, torch.bfloat16)
        ones = torch.ones(shape[1]), torch.ones(shape[0]), torch.ones(shape[0])
        yield "norm_backward", [long, long, *ones, None, True]
    for max_norm in (1e3, 30.0):
        yield "clip_coef", [torch.full((ODD,), 4.0).double(), max_norm]
    for n in (ODD, ODD - 1, ODD - 4, ODD - 7):
        x = small_integers((n,), torch.float32)
        yield "amax", [x]
        yield "quantize", [x, torch.float8_e5m2, one, False, "tensor", True]
        yield "dequantize", [x.to(e4m3), one, torch.bfloat16]
        for bits in (8, 4, 2):
            codes, ranges = reference("pack")(x, bits, 1, 2, None)
            yield "pack", [x, bits, 1, 2, torch.tensor([3]) if bits == 4 else None]
            yield "unpack", [codes, ranges, bits, [n], torch.bfloat16]
        for masters, rule in itertools.product(
            (False, True), ("decoupled", "momentum", "lion", "muon")
        ):
            kinds = [kind for kind in KINDS if (kind[1] is not None) is masters]
            mixed = [mix for kind in kinds for mix in mixes(*kind)[::5]]
            yield RULES[rule][0], arguments(rule, mixed, [(n,)], stochastic_rounding=True)
    grads = [small_integers((n,), torch.float32, 4, n) for n in (0, 98309, *[33] * 40)]
    for counts in (None, torch.full((len(grads), 4), -1)):
        sums = torch.zeros(len(grads)).double()
        yield "grad_stats_", [[g.bfloat16() for g in grads], None, one - 1, sums, counts]
        yield "unscale_", [[g[:ODD] for g in grads], one / 2, one - 1, counts]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Path]:
    """The calls, in the form that sanitized.cpp reads."""
    path = tmp_path_factory.mktemp("calls") / "calls"

    def encoded(value: runner.Argument) -> bytes:
        if isinstance(value, Sequence):
            return struct.pack("q", len(value)) + b"".join(map(encoded, value))
        if value is None:
            return struct.pack("qq", -1, 0)
        if isinstance(value, torch.Tensor):
            content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            return struct.pack("qq", len(content), value.data_ptr() % 16) + content
        if isinstance(value, torch.dtype):
            value = runner.DTYPES.index(value)
        return struct.pack("d" if isinstance(value, float) else "q", value)

    def record(function: str, args: Sequence[runner.Argument], done: bool) -> None:
        if done:
            arrays = [a for a in tensors(list(args)) if a is not None]
            file.write(b"".join(encoded(a)[16:] for a in arrays))
        else:
            file.write(function.encode() + b"\n" + b"".join(map(encoded, args)))

    anywhere = Agreement(runner.OPS.__getitem__, dense=True)
    aligned = Agreement(runner.OPS.__getitem__)  # as the tensors of calls()
    random.seed(0)
    with path.open("wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "on_call", record)
        patch.setattr(runner, "SMS", (1,))
        shifts = runner.SHIFTS
        for op, args in calls():
            anywhere(op, args)
            if op == "norm_backward":  # whose pass by bands is for aligned arrays
                patch.setattr(runner, "SHIFTS", (0,))
                aligned(op, args)
                patch.setattr(runner, "SHIFTS", shifts)
    return path


@cache
def program(sanitizer: str) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe")
        command = ["g++", f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", str(probe)]
        if subprocess.run(command, input=b"int main() {}", capture_output=True).returncode != 0:
            pytest.skip(f"this g++ cannot link -fsanitize={sanitizer} (no run-time library)")
        ran = subprocess.run([probe], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run on this machine: {ran.stderr[-300:]}")
    scheduler = runner.compile_(["-O1", "-c", runner.SCHEDULER], ".o")
    flag = f"-fsanitize={sanitizer}"
    if sanitizer == "thread":
        return runner.compile_([flag, scheduler, runner.instrumented()], ".sanitized")
    # Not optimized: that takes longer to compile than it saves in the run.
    command = ["-O0", "-g1", flag, "-fno-sanitize-recover=all", scheduler]
    return runner.compile_([*command, runner.HERE / "sanitized.cpp"], ".sanitized")


def sanitized(sanitizer: str, calls: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Returns 0, 1 where a value is wrong, 66 where the sanitizer has found something."""
    options = "exitcode=66 halt_on_error=1"
    names = ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    env = os.environ | dict.fromkeys(names, options) | env
    command = [program(sanitizer), calls]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_the_kernels_stay_in_their_memory_and_aligned(recorded: Path) -> None:
    done = sanitized("address,alignment,shift,signed-integer-overflow", recorded)
    assert done.returncode == 0, done.stdout + done.stderr


def barriers() -> list[str]:
    """Every barrier, as "file:line". Those of the Hopper GEMM: test_hopper_gemm.py."""
    files = sorted(f for f in (runner.CSRC / "cuda").rglob("*.cuh") if "sm90" not in f.name)
    lines = ((f, i + 1, line) for f in files for i, line in enumerate(f.read_text().splitlines()))
    return [f"{file.name}:{i}" for file, i, line in lines if "__syncthreads();" in line]


def test_no_barrier_is_missing(recorded: Path) -> None:
    done = sanitized("thread", recorded)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(barriers()) >= 4, "no barriers found in csrc/cuda"


@pytest.mark.parametrize("barrier", barriers())
def test_every_barrier_is_needed(recorded: Path, barrier: str) -> None:
    done = sanitized("thread", recorded, MIXPREC_WITHOUT_BARRIER=barrier)
    assert done.returncode in (1, 66), "neither a value nor ThreadSanitizer shows that it is gone"
