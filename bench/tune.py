"""Measure gemm on the GPU at hand, and write which backend, in which tile, is the fastest.

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
from typing import Any, NamedTuple

import torch

import mixprec
from mixprec.ops._dispatch import gemm_table, library
from mixprec.ops.gemm import gemm_op

from ..triton_kernels import configs
from . import verify
from .device import operand, randn, scales
from .results import write_json
from .timing.run import sets
from .timing.timer import Budget, Candidate, Clock, CudaClock, interleave, medians, settle

Shape = tuple[int, int, int]  # M, N, K
Run = Callable[..., torch.Tensor]
Contender = tuple[Run, Callable[[], contextlib.AbstractContextManager[None]]]
Tile = gemm_table.CudaTile | configs.Config


class Family(NamedTuple):
    """Operands that stand for a family of gemm_table. layouts: of a and b, "n" row-major and "t"
    transposed, as a step has them: forward, gradient of the input, gradient of the weight."""

    dtype: torch.dtype
    fast_accum: bool = False
    blocks: bool = False
    layouts: tuple[str, ...] = ("nt",)  # FP8 has no other kernel: the others are copied


FAMILIES = {
    "16-bit": Family(torch.bfloat16, layouts=("nt", "nn", "tn")),
    "16-bit blocks": Family(torch.bfloat16, blocks=True),
    "fp8": Family(torch.float8_e4m3fn),
    "fp8 blocks": Family(torch.float8_e4m3fn, blocks=True),
    "fp8 fast": Family(torch.float8_e4m3fn, fast_accum=True),
}
SHAPES: dict[str, tuple[Shape, ...]] = {
    "thin": ((16, 4096, 4096), (64, 14336, 4096)),
    "unaligned": ((1023, 1029, 2511), (2047, 3073, 8191)),
    "small": ((512, 512, 512), (1024, 1024, 1024)),
    "medium": ((2048, 4096, 4096), (4096, 4096, 4096)),
    "large": ((8192, 8192, 8192), (8192, 4096, 14336)),
}
# A variant of ours has to be faster than torch's by this much to be taken in its place, and a tile
# of the CUDA kernel than the one that its planner chooses for each shape.
MARGIN = 1.01


def arguments(
    family: str, layout: str, shape: Shape, device: str, seed: int
) -> tuple[tuple[Any, ...], float]:
    """gemm's arguments, and the product of their scales."""
    m, n, k = shape
    dtype, fast, blocks, _ = FAMILIES[family]
    a = operand(m, k, dtype, layout[0], seed, device)
    b = operand(k, n, dtype, layout[1], seed + 1, device)
    given: tuple[torch.Tensor | None, ...] = (None, None)
    if blocks:
        given = scales(shape, "block", device)
    elif dtype.itemsize == 1:
        given = (torch.ones((), device=device),) * 2
    return (a, b, *given, None, torch.bfloat16, fast), 0.125 if blocks else 1.0


def tiles(capability: int, family: str) -> dict[str, Tile]:
    """The tiles to try, by contender: those of the CUDA kernel, "cuda 0" on; of Triton, "triton 0"
    on, the defaults of all sizes, and each with one stage fewer or more."""
    found: dict[str, Tile] = {}
    for i, (of, tile) in gemm_table.cuda_tiles().items():
        if of == family and capability == 90:
            found[f"cuda {i}"] = tile
    itemsize = FAMILIES[family].dtype.itemsize
    soft = " soft" if itemsize == 1 and capability < 89 else ""
    kind = "fp8 soft" if family == "fp8 fast" and soft else family + soft
    tried: list[configs.Config] = []
    for default in configs.tiles_of(capability, kind):
        for stages in (0, -1, 1):
            config = replace(default, stages=default.stages + stages)
            if configs.why_not(asdict(config), capability, itemsize) is None:
                tried.append(config)
    return found | {f"triton {i}": config for i, config in enumerate(dict.fromkeys(tried))}


@contextlib.contextmanager
def forcing(tile_config: int) -> Iterator[None]:
    """The CUDA GEMM computes in this tile inside the block, for the whole process."""
    torch.ops.mixprec.gemm_sm90_force(tile_config)
    try:
        yield
    finally:
        torch.ops.mixprec.gemm_sm90_force()


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


def contenders(args: tuple[Any, ...], index: int, tried: dict[str, Tile]) -> dict[str, Contender]:
    """What can do this call on GPU `index`, and what each runs inside of: "vendor", "cuda" (its
    planner chooses the tile), and the backends in each of the tiles that are tried."""
    able: dict[str, Contender] = {}
    for backend in gemm_table.BACKENDS:
        if gemm_op.why_not(backend, "cuda", index, args) is not None:
            continue
        with mixprec.use_backend(backend):
            run = gemm_op.choose("cuda", index, args)
        if backend != "triton":
            able[backend] = run, contextlib.nullcontext
        for name, tile in tried.items():
            if name.split()[0] != backend:
                continue
            if isinstance(tile, configs.Config):
                able[name] = run, partial(using, tile)
            else:
                able[name] = run, partial(forcing, int(name.split()[1]))
    return able


def times_of(
    family: str,
    layout: str,
    shape: Shape,
    device: str,
    clock: Clock,
    tried: dict[str, Tile],
    seconds: float,
) -> dict[str, float]:
    """Seconds on the device per contender. ValueError for one whose values are wrong."""
    first, factor = arguments(family, layout, shape, device, 0)
    # So many operands that the GPU's cache does not hold them together.
    count = sets(sum(t.numel() * t.element_size() for t in first[:2]))
    inputs = [first, *(arguments(family, layout, shape, device, 2 * i)[0] for i in range(1, count))]
    runs: dict[str, Candidate] = {}
    for name, (run, inside) in contenders(first, torch.device(device).index or 0, tried).items():
        try:
            with inside():
                c = run(*first)
        except Exception as error:
            if name not in tried:
                raise
            print(f"  {name} does not run: {str(error).splitlines()[0]}")  # too much shared memory
            continue
        # The shorter accumulator was asked for: it is not held to FP32's tolerance.
        wrong = None if first[-1] else verify.gemm(c, first[0], first[1], factor)
        if wrong is not None:
            raise ValueError(f"gemm of {shape} in {family}, {layout}, by {name} is wrong: {wrong}")
        runs[name] = Candidate(lambda s, run=run: run(*inputs[s]), inside)
    if len(runs) < 2:
        return dict.fromkeys(runs, 1.0)  # nothing to compare with
    return medians(interleave(runs, sets=count, clock=clock, budget=Budget(seconds=seconds)))


def fastest(measured: list[dict[str, float]]) -> tuple[str, float] | None:
    """The contender with the smallest geometric mean among those that did every shape, and how many
    times faster it is than the best other backend, or the best other tile where there is none.
    torch's where ours is not MARGIN faster, then the CUDA planner's choice where no tile is. None
    without two contenders."""
    common = [name for name in measured[0] if all(name in times for times in measured)]
    if len(common) < 2:
        return None
    mean = {n: math.exp(sum(math.log(t[n]) for t in measured) / len(measured)) for n in common}
    best = min(common, key=lambda name: mean[name])
    if "vendor" in mean and mean["vendor"] < mean[best] * MARGIN:
        best = "vendor"
    elif best.startswith("cuda ") and mean.get("cuda", math.inf) < mean[best] * MARGIN:
        best = "cuda"
    others = [mean[n] for n in common if n.split()[0] != best.split()[0]]
    return best, min(others or [mean[n] for n in common if n != best]) / mean[best]


def measure(
    device: str, clock: Clock, *, capability: library.Capability, seconds: float
) -> dict[str, gemm_table.Entry]:
    """An entry for each family and size class in which two contenders or more can do all shapes in
    all layouts."""
    gemm_table.use_cuda_tiles({})  # "cuda" is the planner's choice, not that of an earlier run
    entries = {}
    for family, (*_, layouts) in FAMILIES.items():
        tried = tiles(10 * capability[0] + capability[1], family)
        for size, shapes in SHAPES.items():
            times = [
                times_of(family, layout, shape, device, clock, tried, seconds)
                for shape in shapes
                for layout in layouts
            ]
            found = fastest(times)
            if found is None:
                print(f"{family:13} {size:10} no choice: fewer than two variants can do it")
                continue
            name, speedup = found
            backend, tile = name.split()[0], asdict(tried[name]) if name in tried else None
            print(f"{family:13} {size:10} {backend:8} {speedup:.2f}x the next  {tile or ''}")
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
