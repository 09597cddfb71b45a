"""make gpu-bench: the rows of the GPU in stages, each leaving one JSON file, whatever happens.

Every stage runs in a process of its own, which says in its file what it is about to do. Where a
kernel kills that process, hangs, or loses the GPU, another process goes on: without that variant in
that row, and after a second time without it altogether.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gpu, gpu_run, gpu_table, gpu_timer, results, table
from .environment import environment
from .registry import Row
from .rows import select
from .run import heading, measure

# The rows of a stage, and its share of the time.
STAGES: dict[str, tuple[tuple[str, ...], float]] = {
    "memory": (
        (
            *("copy", "quantize", "amax", "dequantize", "unscale_", "grad_stats_"),
            *("inv_scale", "clip_coef", "scale_from_amax_", "update_delayed_scales_"),
        ),
        0.32,
    ),
    "step": (("adamw_", "sgd_"), 0.14),
    "gemm": (("gemm", "gemm_accumulate_"), 0.34),
    "layer": (("layer",), 0.15),
    "overhead": (("overhead",), 0.05),
}
BUDGET = 420.0  # seconds for all stages
STARTS = 8  # processes per stage
SILENT = 120.0  # a process that finishes no row for so long hangs
GRACE = 60.0  # for starting, and beyond its time, before a process is killed
LOST = 3  # exit status: the GPU no longer answers, and rows are left
RUNNING = "the program died or hung while it ran"


def rows_of(stage: str, full: bool) -> list[Row]:
    words = [f"cuda/{op}" for op in STAGES[stage][0]]
    return select(words, device="cuda", quick=not full)


def result_file(folder: Path, stage: str) -> Path:
    return folder / f"bench-{stage}.json"


@dataclass
class _Stage:
    """The file of a stage while it runs."""

    path: Path
    environment: dict[str, Any]
    facts: dict[str, Any]  # stage, gpu_before, broken
    rows: list[dict[str, Any]]

    def save(self, running: dict[str, Any] | None = None) -> None:
        more = {**self.facts, "gpu_after": gpu.snapshot()} if running is None else self.facts
        rows = self.rows if running is None else [*self.rows, running]
        results.save(self.path, self.environment, rows, **more)

    def broken(self, row: Row) -> dict[str, str]:
        """The backends that killed a process in this row, or in two rows of its op."""
        same = [b for b in self.facts["broken"] if b["op"] == row.op]
        return {
            b["backend"]: f"{b['reason']} ({b['row']})"
            for b in same
            if b["row"] == row.name or [s["backend"] for s in same].count(b["backend"]) > 1
        }


def _open(stage: str, path: Path, full: bool, resume: bool) -> _Stage:
    """A new file, or the one that a process left behind; the variant that was being tried then is
    noted as broken, and its row is taken again."""
    environment_ = {**environment(quick=not full), **gpu.facts()}
    if not (resume and path.exists()):
        facts: dict[str, Any] = {"stage": stage, "gpu_before": gpu.snapshot(), "broken": []}
        return _Stage(path, environment_, facts, [])
    content = results.load(path)
    facts = {key: content[key] for key in ("stage", "gpu_before", "broken")}
    rows = content["rows"]
    if rows and rows[-1].get("trying"):
        last = rows.pop()
        keys = {key: last[key] for key in ("op", "reason")}
        facts["broken"].append({**keys, "row": last["name"], "backend": last["trying"]})
    return _Stage(path, environment_, facts, rows)


def run_stage(
    stage: str, path: Path, *, seconds: float, samples: int, full: bool, resume: bool
) -> int:
    """Measure the rows of a stage that `path` does not hold; LOST if the GPU is. What time is left
    is shared among the rows that are left."""
    rows = rows_of(stage, full)
    file = _open(stage, path, full, resume)
    have = {row["name"] for row in file.rows}
    left = [row for row in rows if row.name not in have]
    end = time.monotonic() + seconds
    if left and gpu.name() is not None:
        gpu_timer.settle(_load(), gpu_run.clock())
    watch = gpu.Watch()
    try:
        for i, row in enumerate(left):
            share = max(0.0, end - time.monotonic()) / (len(left) - i)
            if not _run_row(row, file, watch, samples=samples, seconds=share):
                return LOST
            done = file.rows[-1]
            words = f"[{len(file.rows)}/{len(rows)}] {row.name} {done['took']:.1f} s"
            print(words, file=sys.stderr, flush=True)
    finally:
        watch.close()
    file.save()
    return 0


def _run_row(row: Row, file: _Stage, watch: gpu.Watch, *, samples: int, seconds: float) -> bool:
    """Measure one row into the file; False if the GPU is lost."""
    running = heading(row) | {"status": "failed", "reason": RUNNING, "trying": ""}

    def trying(backend: str) -> None:
        file.save(running | {"trying": backend})
        running["trying"] = backend

    trying("")
    gc.collect()
    gpu.release()
    start = time.monotonic()
    try:
        result = measure(
            row, samples=samples, seconds=seconds, trying=trying, broken=file.broken(row)
        )
        gpu_run.answers()
    except gpu_run.DeviceLost as error:
        file.save(running | {"reason": str(error)})
        return False
    took = time.monotonic() - start
    file.rows.append(result | {"took": took, "watched": watch.since_last()})
    return True


def _load() -> Callable[[], Any]:
    """Work that heats the GPU as a training run does."""
    a = gpu.randn(8192, 8192).bfloat16()
    return lambda: a @ a


def run_all(
    stages: list[str], folder: Path, *, budget: float | None, samples: int, full: bool
) -> dict[str, dict[str, Any]]:
    """Run stages one after another, each in its own processes; their results by stage.

    budget: seconds for these stages together; None for each one's share of BUDGET.
    """
    weights = sum(STAGES[s][1] for s in stages) if budget is not None else 1.0
    budget = BUDGET if budget is None else budget
    for stage in stages:
        path = result_file(folder, stage)
        path.unlink(missing_ok=True)  # an old result must not pass for a new one
        seconds = budget * STAGES[stage][1] / weights
        arguments = ["--samples", str(samples), *(["--full"] if full else [])]
        _stage_processes(stage, path, seconds, arguments)
        _complete(stage, path, full)
    return {stage: results.load(result_file(folder, stage)) for stage in stages}


def _stage_processes(stage: str, path: Path, seconds: float, arguments: list[str]) -> None:
    end = time.monotonic() + seconds
    for start in range(STARTS):
        left = max(end - time.monotonic(), 1.0)
        command = [sys.executable, "-m", "mixprec.bench", "gpu-stage", stage, "--out", str(path)]
        command += ["--seconds", f"{left:.1f}", *arguments, *(["--resume"] if start else [])]
        status = watched(command, path, last=time.monotonic() + 1.25 * left + GRACE)
        if status == 0 or time.monotonic() > end + 0.25 * seconds:
            return
        print(f"{stage}: the process ended with status {status}; going on", file=sys.stderr)


def watched(command: list[str], path: Path, last: float) -> int:
    """Run a stage; kill it when its file has not changed for too long, or at `last`."""
    process = subprocess.Popen(command)
    changed = time.monotonic()
    seen = None
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            stamp = path.stat().st_mtime_ns if path.exists() else None
            if stamp != seen:
                seen, changed = stamp, now
            if now - changed > SILENT or now > last:
                process.kill()
                return process.wait()


def _complete(stage: str, path: Path, full: bool) -> None:
    """Name the rows that were never reached."""
    content = results.load(path) if path.exists() else None
    found = content["rows"] if content is not None else []
    have = {row["name"] for row in found}
    reason = {"status": "not measured", "reason": "out of time"}
    missing = [heading(r) | reason for r in rows_of(stage, full) if r.name not in have]
    if content is None:
        where = environment(quick=not full)
        where |= {"rehearsal": gpu.REHEARSAL, "gpu_name": gpu.name()}
        reason["reason"] = "the program did not start"
        missing = [heading(r) | reason for r in rows_of(stage, full)]
        results.save(path, where, missing, stage=stage)
    elif missing:
        kept = {k: v for k, v in content.items() if k not in ("schema", "environment", "rows")}
        results.save(path, content["environment"], found + missing, **kept)


def show(by_stage: dict[str, dict[str, Any]]) -> int:
    """Print the tables, short, the summary last; 1 if a variant was wrong or failed."""
    rows = [row for content in by_stage.values() for row in content["rows"]]
    name = next((c["environment"].get("gpu_name") for c in by_stage.values()), None)
    peak = gpu.ceiling(name)
    # Of the products only those that miss; the families below stand for the others.
    shown = [row for row in rows if not row.get("flops") or not row["met"]]
    body = [line for row in shown for line in gpu_table.lines(row, peak)]
    print(*table.plain(body, gpu_table.HEADER), sep="\n")
    if groups := gpu_table.families(rows):
        print("", *table.plain(groups, gpu_table.FAMILY_HEADER), sep="\n")
    print(*gpu_table.remarks(rows), sep="\n")
    for stage, content in by_stage.items():
        print(f"{stage:10} {gpu_table.summary(content['rows'])}")
    return 1 if gpu_table.bad(rows) else 0
