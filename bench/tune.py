"""Measure gemm on the GPU at hand, and write which backend, and which Triton tile, is the fastest.

The entries go to the file of GEMM choices ($MIXPREC_TUNED, or mixprec/gemm_table.json in
the cache folder), which mixprec reads when it is next started.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mixprec
from mixprec.ops._dispatch import gemm_table, library
from mixprec.ops.gemm import gemm_op

from ..triton_kernels import configs
from . import verify
from .device import randn
from .results import write_json
from .timing.run import sets
from .timing.timer import Budget, Candidate, Clock, CudaClock, interleave, medians, settle

Shape = tuple[int, int, int]  # M, N, K
Run = Callable[..., torch.Tensor]
Contender = tuple[Run, Callable[[], contextlib.AbstractContextManager[None]]]

# Operands that stand for a family of gemm_table: their dtype, and fast_accum. Products with scales
# of blocks have one backend that can do them, and no choice.
FAMILIES = {
    "16-bit": (torch.bfloat16, False),
    "fp8": (torch.float8_e4m3fn, False),
    "fp8 fast": (torch.float8_e4m3fn, True),
}
SHAPES: dict[str, tuple[Shape, ...]] = {
    "thin": ((16, 4096, 4096), (64, 14336, 4096)),
    "unaligned": ((1023, 1029, 2511), (2047, 3073, 8191)),
    "small": ((512, 512, 512), (1024, 1024, 1024)),
    "medium": ((2048, 4096, 4096), (4096, 4096, 4096)),
    "large": ((8192, 8192, 8192), (8192, 4096, 14336)),
}
# A variant of ours has to be faster than torch's by this much to be taken in its place.
MARGIN = 1.01


def arguments(family: str, shape: Shape, device: str, seed: int) -> tuple[Any, ...]:
    """gemm's arguments as a linear layer has them: a [M, K], b = weight^T, scales for FP8."""
    m, n, k = shape
    dtype, fast = FAMILIES[family]
    a = randn(m, k, dtype=dtype, seed=seed, on=device)
    weight = randn(n, k, dtype=dtype, seed=seed + 1, on=device)
    one = torch.ones((), device=device) if dtype.itemsize == 1 else None
    return a, weight.t(), one, one, None, torch.bfloat16, fast


def tiles(capability: int, family: str) -> list[configs.Config]:
    """Triton's tiles to try: the defaults of all sizes, and each with one stage fewer or more."""
    kind = "fp8 soft" if family.startswith("fp8") and capability < 89 else family
    itemsize = FAMILIES[family][0].itemsize
    found: list[configs.Config] = []
    for config in configs.TILES[configs.known_arch(capability), kind]:
        for stages in (0, -1, 1):
            tried = replace(config, stages=config.stages + stages)
            if configs.why_not(asdict(tried), capability, itemsize) is None and tried not in found:
                found.append(tried)
    return found


@contextlib.contextmanager
def using(config: configs.Config) -> Iterator[None]:
    """Triton's GEMM computes in this tile inside the block."""
    before, configs.measured = configs.measured, lambda *_: asdict(config)
    configs.pick.cache_clear()
    try:
        yield
    finally:
        configs.measured = before
        configs.pick.cache_clear()


def contenders(
    args: tuple[Any, ...], index: int, tried: list[configs.Config]
) -> dict[str, Contender]:
    """What can do this call on GPU `index`: "cuda", "vendor" and "triton 0" to "triton n", one for
    each tile; and what each runs inside of."""
    able: dict[str, Contender] = {}
    for backend in gemm_table.BACKENDS:
        if gemm_op.why_not(backend, "cuda", index, args) is not None:
            continue
        with mixprec.use_backend(backend):
            run = gemm_op.choose("cuda", index, args)
        if backend == "triton":
            able |= {f"triton {i}": (run, partial(using, c)) for i, c in enumerate(tried)}
        else:
            able[backend] = run, contextlib.nullcontext
    return able


def times_of(
    family: str,
    shape: Shape,
    device: str,
    clock: Clock,
    tried: list[configs.Config],
    seconds: float,
) -> dict[str, float]:
    """Seconds on the device per contender. ValueError for one whose values are wrong."""
    first = arguments(family, shape, device, 0)
    # So many operands that the GPU's cache does not hold them together.
    count = sets(sum(t.numel() * t.element_size() for t in first[:2]))
    inputs = [first, *(arguments(family, shape, device, 2 * i) for i in range(1, count))]
    runs: dict[str, Candidate] = {}
    for name, (run, inside) in contenders(first, torch.device(device).index or 0, tried).items():
        try:
            with inside():
                c = run(*first)
        except Exception as error:
            if not name.startswith("triton"):
                raise
            print(f"  {name} does not run: {str(error).splitlines()[0]}")  # too much shared memory
            continue
        # The shorter accumulator was asked for: it is not held to FP32's tolerance.
        wrong = None if first[-1] else verify.gemm(c, first[0], first[1])
        if wrong is not None:
            raise ValueError(f"gemm of {shape} in {family} by {name} is wrong: {wrong}")
        runs[name] = Candidate(lambda s, run=run: run(*inputs[s]), inside)
    if len(runs) < 2:
        return dict.fromkeys(runs, 1.0)  # nothing to compare with
    return medians(interleave(runs, sets=count, clock=clock, budget=Budget(seconds=seconds)))


def fastest(measured: list[dict[str, float]]) -> tuple[str, float] | None:
    """The contender with the smallest geometric mean among those that did every shape, and how many
    times faster it is than the best other backend; torch's where ours is not MARGIN faster. None
    without two backends."""
    common = [name for name in measured[0] if all(name in times for times in measured)]
    if len({name.split()[0] for name in common}) < 2:
        return None
    mean = {n: math.exp(sum(math.log(t[n]) for t in measured) / len(measured)) for n in common}
    best = min(common, key=lambda name: mean[name])
    if "vendor" in mean and mean["vendor"] < mean[best] * MARGIN:
        best = "vendor"
    others = [mean[n] for n in common if n.split()[0] != best.split()[0]]
    return best, min(others) / mean[best]


def measure(
    device: str,
    clock: Clock,
    *,
    capability: library.Capability,
    seconds: float,
) -> dict[str, gemm_table.Entry]:
    """An entry for each family and size class in which two backends or more can do all shapes."""
    entries = {}
    for family in FAMILIES:
        tried = tiles(10 * capability[0] + capability[1], family)
        for size, shapes in SHAPES.items():
            times = [times_of(family, shape, device, clock, tried, seconds) for shape in shapes]
            found = fastest(times)
            if found is None:
                print(f"{family:8} {size:10} no choice: fewer than two backends can do it")
                continue
            (backend, *number), speedup = found[0].split(), found[1]
            tile = asdict(tried[int(number[0])]) if number else None
            print(f"{family:8} {size:10} {backend:8} {speedup:.2f}x the next  {tile or ''}")
            entries[f"{family} {size}"] = gemm_table.Entry(backend, tile)
    return entries


def save(path: Path, entries: dict[str, gemm_table.Entry], arch: str) -> None:
    """Write `entries`, keeping what the file has of other architectures."""
    kept: gemm_table.Table = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # it is damaged
        kept = gemm_table.read(path)
    write_json(path, {**kept, arch: entries})
    gemm_table.table.cache_clear()


def tune(args: argparse.Namespace) -> int:
    """Measure, print, write. 0: done; 1: no CUDA device, or a variant gives wrong values."""
    if not torch.cuda.is_available():
        print("tune: no CUDA device: there is nothing to measure", file=sys.stderr)
        return 1
    index = torch.cuda.current_device()
    capability = library.capability(index) or (0, 0)
    device, clock = f"cuda:{index}", CudaClock()
    x = randn(4096, 4096, dtype=torch.bfloat16, on=device)
    settle(lambda: torch.mm(x, x), clock)
    out = args.out if args.out is not None else gemm_table.user_file()
    try:
        entries = measure(device, clock, capability=capability, seconds=args.seconds)
    except ValueError as error:
        print(f"tune: {error}; nothing is written", file=sys.stderr)
        return 1
    save(out, entries, "{}.{}".format(*capability))
    print(f"written: {out} ({len(entries)} entries for {torch.cuda.get_device_name(index)})")
    return 0
