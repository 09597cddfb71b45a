"""make gpu-bench: the cases of the GPU in stages, each leaving one JSON file, whatever happens.

Every stage runs in a process of its own, which says in its file what it is about to do. Where a
kernel kills that process, hangs, or loses the GPU, another process goes on: without that variant in
that case, and after a second time without it altogether.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import results, table
from ..cases import select
from ..cases.registry import Case
from ..environment import environment
from ..timing import timer
from ..timing.run import DeviceLost, clock, heading, measure, synchronize
from . import device, supervisor

# The ops of a stage, and its share of the time.
STAGES: dict[str, tuple[tuple[str, ...], float]] = {
    "memory": (
        (
            *("copy", "quantize", "amax", "dequantize", "quantize_mx", "dequantize_mx"),
            *("pack", "unpack", "unscale_"),
            *(
                "grad_stats_",
                "inv_scale",
                "clip_coef",
                "scale_from_amax_",
                "update_delayed_scales_",
            ),
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
SILENT = 120.0  # a process that finishes no case for so long hangs
GRACE = 60.0  # for starting, and beyond its time, before a process is killed
LOST = 3  # exit status: the GPU no longer answers, and cases are left
RUNNING = "the program died or hung while it ran"


def cases_of(stage: str, full: bool) -> list[Case]:
    words = [f"cuda/{op}" for op in STAGES[stage][0]]
    return select(words, device="cuda", quick=not full)


def result_file(folder: Path, stage: str) -> Path:
    return folder / f"bench-{stage}.json"


@dataclass
class _File:
    """The file of a stage while it runs; about: stage, gpu_before, broken."""

    path: Path
    environment: dict[str, Any]
    about: dict[str, Any]
    rows: list[dict[str, Any]]

    def save(self, running: dict[str, Any] | None = None) -> None:
        more = {**self.about, "gpu_after": device.snapshot()} if running is None else self.about
        rows = self.rows if running is None else [*self.rows, running]
        results.save(self.path, self.environment, rows, **more)

    def broken(self, case: Case) -> dict[str, str]:
        """The backends that killed a process in this case, or in two cases of its op."""
        same = [b for b in self.about["broken"] if b["op"] == case.op]
        return {
            b["backend"]: f"{b['reason']} ({b['name']})"
            for b in same
            if b["name"] == case.name or [s["backend"] for s in same].count(b["backend"]) > 1
        }


def _open(stage: str, path: Path, full: bool, resume: bool) -> _File:
    """A new file, or the one that a process left behind; the variant that was being tried then is
    noted as broken, and its case is taken again."""
    where = {**environment(quick=not full), **device.properties()}
    if not (resume and path.exists()):
        about: dict[str, Any] = {"stage": stage, "gpu_before": device.snapshot(), "broken": []}
        return _File(path, where, about, [])
    content = results.load(path)
    about = {key: content[key] for key in ("stage", "gpu_before", "broken")}
    rows = content["rows"]
    if rows and rows[-1].get("trying"):
        last = rows.pop()
        about["broken"].append(
            {**{key: last[key] for key in ("op", "name", "reason")}, "backend": last["trying"]}
        )
    return _File(path, where, about, rows)


def run_stage(
    stage: str, path: Path, *, seconds: float, samples: int, full: bool, resume: bool
) -> int:
    """Measure the cases of a stage that `path` does not hold; LOST if the GPU is. What time is left
    is shared among the cases that are left."""
    cases = cases_of(stage, full)
    file = _open(stage, path, full, resume)
    have = {row["name"] for row in file.rows}
    left = [case for case in cases if case.name not in have]
    end = time.monotonic() + seconds
    if left and device.name() is not None:
        timer.settle(_load(), clock(True))
    watch = device.Watch()
    try:
        for i, case in enumerate(left):
            share = max(0.0, end - time.monotonic()) / (len(left) - i)
            if not _run_case(case, file, watch, samples=samples, seconds=share):
                return LOST
            took = file.rows[-1]["took"]
            done = f"[{len(file.rows)}/{len(cases)}] {case.name} {took:.1f} s"
            print(done, file=sys.stderr, flush=True)
    finally:
        watch.close()
    file.save()
    return 0


def _run_case(
    case: Case, file: _File, watch: device.Watch, *, samples: int, seconds: float
) -> bool:
    """Measure one case into the file; False if the GPU is lost."""
    running = heading(case) | {"status": "failed", "reason": RUNNING, "trying": ""}

    def trying(backend: str) -> None:
        file.save(running | {"trying": backend})
        running["trying"] = backend

    trying("")
    gc.collect()
    device.release()
    start = time.monotonic()
    try:
        result = measure(
            case, samples=samples, seconds=seconds, trying=trying, broken=file.broken(case)
        )
        synchronize()
    except DeviceLost as error:
        file.save(running | {"reason": str(error)})
        return False
    took = time.monotonic() - start
    file.rows.append(result | {"took": took, "watched": watch.since_last()})
    return True


def _load() -> Callable[[], Any]:
    """Work that heats the GPU as a training run does."""
    a = device.randn(8192, 8192).bfloat16()
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
        limit = 1.25 * left + GRACE
        status = supervisor.run(command, limit=limit, progress=path, silent=SILENT)
        if status == 0 or time.monotonic() > end + 0.25 * seconds:
            return
        print(f"{stage}: the process ended with status {status}; going on", file=sys.stderr)


def _complete(stage: str, path: Path, full: bool) -> None:
    """Name the cases that were never reached."""
    if path.exists():
        content = results.load(path)
        reason = "out of time"
    else:
        where = environment(quick=not full)
        where |= {"dry_run": device.DRY_RUN, "gpu_name": device.name()}
        content = {"environment": where, "rows": [], "stage": stage}
        reason = "the program did not start"
    have = {row["name"] for row in content["rows"]}
    never = {"status": "not measured", "reason": reason}
    missing = [heading(c) | never for c in cases_of(stage, full) if c.name not in have]
    if missing:
        kept = {k: v for k, v in content.items() if k not in ("schema", "environment", "rows")}
        results.save(path, content["environment"], content["rows"] + missing, **kept)


def show(by_stage: dict[str, dict[str, Any]]) -> int:
    """Print the tables, short, the summary last; 1 if a variant was wrong or failed."""
    rows = [row for content in by_stage.values() for row in content["rows"]]
    gpu_name = next((c["environment"].get("gpu_name") for c in by_stage.values()), None)
    # Of the products only those that miss; the families below stand for the others.
    shown = [row for row in rows if not row.get("flops") or not row["met"]]
    table.show(shown, device.peak(gpu_name))
    if groups := table.families(rows):
        print("", *table.plain(table.FAMILY_HEADER, groups), sep="\n")
    for stage, content in by_stage.items():
        print(f"{stage:10} {table.summary(content['rows'])}")
    return 1 if table.bad(rows) else 0
