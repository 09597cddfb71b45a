"""Measure gemm's variants on the GPU at hand and write which is fastest, per operands and size; and
before that the tiles of the Triton one (tune_tiles.py).

The rows go to a file of the user's, which mixprec reads when it next chooses a gemm:
$MIXPREC_TUNED, or mixprec/gemm_rows.json in the cache folder. What the rows of mixprec say of
the same classes then no longer counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import mixprec
from mixprec._atomic import replace_file
from mixprec.ops._dispatch import backends, gemm_choice, gemm_rows, library

from . import verify
from .timing.timer import Candidate, Clock, CudaClock, interleave, medians, settle

Shape = tuple[int, int, int]  # M, N, K

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
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
    generator = torch.Generator(device).manual_seed(seed)
    a, weight = (
        torch.randn(rows, k, generator=generator, device=device).to(DTYPES[family])
        for rows in (m, n)
    )
    one = torch.ones((), device=device) if family == "fp8" else None
    out_dtype = torch.bfloat16 if family == "fp8" else DTYPES[family]
    return a, weight.t(), one, one, None, out_dtype, False


def contenders(args: tuple[Any, ...], index: int) -> dict[str, Callable[..., torch.Tensor]]:
    """The variants that can do this call on GPU `index`, compared with the reference before."""
    able = {}
    for backend in gemm_rows.BACKENDS:
        if backends.why_not("gemm", backend, "cuda", index, args) is None:
            with mixprec.use_backend(backend):
                able[backend] = backends.choose("gemm", "cuda", args)
    return able


def _sets(args: tuple[Any, ...], cache: int) -> int:
    """How many sets of operands do not fit into the GPU's cache together."""
    size = sum(t.numel() * t.element_size() for t in args[:2])
    return max(2, min(64, math.ceil(2 * cache / size)))


def times_of(
    family: str, shape: Shape, device: str, clock: Clock, *, cache: int, seconds: float
) -> dict[str, float]:
    """Seconds on the device per variant. ValueError for a variant whose values are wrong."""
    first = arguments(family, shape, device, 0)
    able = contenders(first, torch.device(device).index or 0)
    for backend, run in able.items():
        wrong = verify.gemm(run(*first), first[0], first[1])
        if wrong is not None:
            raise ValueError(f"gemm of {shape} in {family} by {backend} is wrong: {wrong}")
    count = _sets(first, cache)
    inputs = [first, *(arguments(family, shape, device, i) for i in range(1, count))]
    runs = {name: Candidate(_run_on(run, inputs)) for name, run in able.items()}
    if len(runs) < 2:
        return dict.fromkeys(runs, 1.0)  # nothing to compare with
    return medians(interleave(runs, sets=count, clock=clock, seconds=seconds))


def _run_on(run: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> Callable[[int], Any]:
    return lambda i: run(*inputs[i])


def fastest(measured: list[dict[str, float]]) -> tuple[str, float] | None:
    """The variant with the smallest geometric mean among those that did every shape, and how many
    times faster it is than the next; torch's where ours is not MARGIN faster. None without two."""
    common = [b for b in gemm_rows.BACKENDS if all(b in times for times in measured)]
    if len(common) < 2:
        return None
    mean = {b: math.exp(sum(math.log(t[b]) for t in measured) / len(measured)) for b in common}
    best = min(common, key=lambda b: mean[b])
    if "vendor" in mean and mean["vendor"] < mean[best] * MARGIN:
        best = "vendor"
    return best, min(mean[b] for b in common if b != best) / mean[best]


def measure(
    device: str,
    clock: Clock,
    *,
    arch: str,
    gpu: str,
    cache: int,
    seconds: float,
    report: Callable[[str], None] = print,
) -> Iterator[gemm_rows.Row]:
    """One row for each family and size class in which two variants or more can do all shapes."""
    date = datetime.now(timezone.utc).date().isoformat()
    for family in gemm_rows.FAMILIES:
        for size, shapes in SHAPES.items():
            measured = [
                times_of(family, shape, device, clock, cache=cache, seconds=seconds)
                for shape in shapes
            ]
            found = fastest(measured)
            if found is None:
                report(f"{family:5} {size:10} no choice: fewer than two variants can do it")
                continue
            backend, speedup = found
            report(f"{family:5} {size:10} {backend:8} {speedup:.2f}x the next")
            yield gemm_rows.Row(arch, family, size, backend, gpu, date, round(speedup, 3))


def save(path: Path, rows: list[gemm_rows.Row], arch: str) -> None:
    """Write `rows`, keeping what the file has of other architectures."""
    kept: dict[tuple[str, str, str], gemm_rows.Row] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # not there, or damaged
        kept = gemm_rows.parse(json.loads(path.read_text(encoding="utf-8")))
    every = [row for row in kept.values() if row.arch != arch] + rows
    text = json.dumps([row._asdict() for row in every], indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    gemm_choice.forget()


def _tune_tiles(
    device: str, clock: Clock, properties: Any, capability: tuple[int, int], seconds: float
) -> None:
    """First the tiles of the Triton kernel, so that it is compared at its best."""
    from . import tune_tiles

    number = 10 * capability[0] + capability[1]
    facts = {"gpu": properties.name, "cache": properties.L2_cache_size, "seconds": seconds}
    run = library.op_handle("gemm_triton")
    rows = list(tune_tiles.measure(device, clock, capability=number, run=run, **facts))
    print(f"written: {tune_tiles.save(rows, number)} ({len(rows)} rows of tiles)")


def tune(argv: list[str] | None = None) -> int:
    """Measure, print, write. 0: done; 1: no CUDA device, or a variant gives wrong values."""
    parser = argparse.ArgumentParser(prog="python -m mixprec.bench tune", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: where mixprec looks for it")
    parser.add_argument("--seconds", type=float, default=2.0, help="per shape (%(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: no CUDA device: there is nothing to measure", file=sys.stderr)
        return 1
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    capability = library.capability(index) or (0, 0)
    arch, device = ".".join(map(str, capability)), f"cuda:{index}"
    clock = CudaClock()
    x = torch.randn(4096, 4096, device=device).bfloat16()
    settle(lambda: torch.mm(x, x), clock)
    out = args.out if args.out is not None else gemm_choice.user_file()
    if backends.why_not("gemm", "triton", "cuda", index) is None:
        _tune_tiles(device, clock, properties, capability, args.seconds)
    try:
        rows = list(
            measure(
                device,
                clock,
                arch=arch,
                gpu=properties.name,
                cache=properties.L2_cache_size,
                seconds=args.seconds,
            )
        )
    except ValueError as error:
        print(f"tune: {error}; nothing is written", file=sys.stderr)
        return 1
    save(out, rows, arch)
    print(f"written: {out} ({len(rows)} rows for {properties.name}, compute capability {arch})")
    return 0
