"""Measure the tiles of the Triton GEMM on the GPU at hand: a row per kind and size of operands.

The rows go to a file of the user's that the kernel's launcher reads ($MIXPREC_TILES, or
mixprec/gemm_tiles.json in the cache folder).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mixprec._atomic import replace_file

from ..triton_kernels import configs
from . import verify
from .timing.timer import Candidate, Clock, interleave, medians

Shape = tuple[int, int, int]  # M, N, K

SHAPES: dict[str, tuple[Shape, ...]] = {
    "skinny": ((16, 4096, 4096), (64, 14336, 4096)),
    "small": ((1024, 1024, 1024), (1024, 4096, 4096)),
    "large": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
# A tile has to be faster than the one in configs.ROWS by this much to take its place.
MARGIN = 1.02

Run = Callable[..., torch.Tensor]


def kinds(capability: int) -> dict[str, tuple[torch.dtype, bool]]:
    """The kinds of operands of a GPU, with an operand dtype and fast_accum for each."""
    fp8 = torch.float8_e4m3fn
    if capability < 89:
        return {"16-bit": (torch.bfloat16, False), "fp8 soft": (fp8, False)}
    return {"16-bit": (torch.bfloat16, False), "fp8": (fp8, False), "fp8 fast": (fp8, True)}


def candidates(capability: int, kind: str, size: str) -> list[configs.Row]:
    """Rows to try: first ours, then the tiles of the other sizes, and one stage fewer or more."""
    arch = configs.known_arch(capability)
    of_kind = [r for r in configs.ROWS if (r.op, r.arch, r.family) == ("gemm", arch, kind)]
    of_kind.sort(key=lambda row: row.size != size)
    rows: list[configs.Row] = []
    for row in of_kind:
        for stages in (0, -1, 1):
            config = replace(row.config, stages=row.config.stages + stages)
            tried = replace(row, arch=capability, size=size, config=config)
            if configs._problem(tried) is None and tried not in rows:
                rows.append(tried)
    return rows


def arguments(dtype: torch.dtype, fast: bool, shape: Shape, device: str, seed: int) -> list[Any]:
    """gemm's arguments as a linear layer has them."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(seed)
    a, weight = (
        torch.randn(rows, k, generator=generator, device=device).to(dtype) for rows in (m, n)
    )
    one = torch.ones((), device=device) if dtype.itemsize == 1 else None
    return [a, weight.t(), one, one, None, torch.bfloat16, fast]


@contextlib.contextmanager
def preferred(row: configs.Row) -> Iterator[None]:
    before = configs.prefer([row])
    try:
        yield
    finally:
        configs.prefer(before)


def times_of(
    rows: list[configs.Row],
    inputs: list[list[Any]],
    run: Run,
    clock: Clock,
    *,
    seconds: float,
    report: Callable[[str], None],
) -> dict[int, float]:
    """Seconds on the device for each of `rows` that runs, by its place in the list."""
    runs: dict[str, Candidate] = {}
    for i, row in enumerate(rows):
        try:
            with preferred(row):
                c = run(*inputs[0])
        except Exception as error:  # too much shared memory, a compiler's limit: the next one
            report(f"  {row.config} does not run: {str(error).splitlines()[0]}")
            continue
        # The shorter accumulator is what was asked for: it is not held to FP32's tolerance.
        wrong = None if inputs[0][-1] else verify.gemm(c, inputs[0][0], inputs[0][1])
        if wrong is not None:
            raise ValueError(f"gemm with {row.config} is wrong: {wrong}")
        around = _around(row)
        runs[str(i)] = Candidate(lambda s: run(*inputs[s]), around)
    found = interleave(runs, sets=len(inputs), clock=clock, seconds=seconds) if runs else {}
    return {int(name): time for name, time in medians(found).items()}


def _around(row: configs.Row) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return lambda: preferred(row)


def measure(
    device: str,
    clock: Clock,
    *,
    capability: int,
    gpu: str,
    cache: int,
    seconds: float,
    run: Run,
    report: Callable[[str], None] = print,
) -> Iterator[configs.Row]:
    """The fastest row of each kind and size: the least geometric mean over its shapes. Ours is left
    to stand where nothing is MARGIN faster."""
    date = datetime.now(timezone.utc).date().isoformat()
    for kind, (dtype, fast) in kinds(capability).items():
        for size, shapes in SHAPES.items():
            rows = candidates(capability, kind, size)
            measured: list[dict[int, float]] = []
            for shape in shapes:
                first = arguments(dtype, fast, shape, device, 0)
                bytes_of_one = sum(t.numel() * t.element_size() for t in first[:2])
                sets = max(2, min(64, math.ceil(2 * cache / bytes_of_one)))
                rest = [arguments(dtype, fast, shape, device, i) for i in range(1, sets)]
                measured.append(
                    times_of(rows, [first, *rest], run, clock, seconds=seconds, report=report)
                )
            common = [i for i in range(len(rows)) if all(i in times for times in measured)]
            if not common:
                report(f"{kind:9} {size:7} nothing runs")
                continue
            mean = {
                i: math.exp(sum(math.log(t[i]) for t in measured) / len(shapes)) for i in common
            }
            best = min(common, key=lambda i: mean[i])
            if 0 in mean and mean[0] < mean[best] * MARGIN:
                best = 0
            flops = math.prod(2.0 * m * n * k for m, n, k in shapes) ** (1 / len(shapes))
            tflops = round(flops / mean[best] / 1e12, 1)
            report(f"{kind:9} {size:7} {tflops} TFLOP/s with {rows[best].config}")
            yield replace(rows[best], gpu=gpu, date=date, tflops=tflops)


def save(rows: list[configs.Row], capability: int, path: Path | None = None) -> Path:
    """Write `rows`, keeping what the file has of other GPUs, and use them from now on."""
    path = path or configs.user_file()
    kept: tuple[configs.Row, ...] = ()
    with contextlib.suppress(OSError, ValueError, json.JSONDecodeError):  # not there, or damaged
        kept = configs.use_rows(path)
    every = [row for row in kept if row.arch != capability] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: configs.write_rows(temporary, every))
    configs.use_rows(path)
    return path
