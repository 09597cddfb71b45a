"""make gpu-vision: training steps of vision models per precision, in one JSON file.

Precisions are measured one after another, not in turns: the peak and the largest batch of one are
those of a device that holds nothing else, and what one breaks is not the others' figure. For it,
each warms up until the clocks have had time to settle, and its row holds clocks and power while it
was timed. Time per step includes Python where the device waits for it, as in any training run;
cuDNN chooses by speed; ResNet-50 and EfficientNet are channels_last in every precision. All runs in
a process of its own; where a row kills that or loses the GPU, another goes on with the next row.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mixprec.ops._dispatch import library

from . import gpu, gpu_run, gpu_stages, results, sources, table
from .environment import environment
from .vision_row import Row, key, plan, release, run_row

SECONDS = 420.0  # for all rows
IDLE = 2  # processes that bring no row before it is given up
GRACE = 30.0  # seconds for starting, and beyond its time, before a process is killed
HEADER = ("model", "precision", "TF32", "batch", "images/s", "vs bf16 autocast", "peak", "largest")
TF32 = {None: "no FP32 products", False: "off", True: "on"}


class File:
    """The result file; written after every row, and before what may end the process."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.rows = path, []
        self.environment: dict[str, Any] = {**environment(quick=False), **gpu.facts()}
        ops = sorted(library.TRITON)
        self.facts: dict[str, Any] = {
            "gpu_before": gpu.snapshot(),
            "sources": {op: sources.digest((op,), sources.CHOSEN) for op in ops},
        }
        if resume and (content := read(path)) is not None:
            self.rows = content["rows"]
            self.facts = {name: content[name] for name in self.facts}

    def save(self, running: Row | None = None) -> None:
        more = {**self.facts, "gpu_after": gpu.snapshot()} if running is None else self.facts
        rows = self.rows if running is None else [*self.rows, running]
        results.save(self.path, self.environment, rows, **more)


def read(path: Path) -> dict[str, Any] | None:
    """What `File` wrote; None where there is nothing that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_rows(rows: list[Row], path: Path, *, seconds: float, resume: bool) -> int:
    """Measure those of `rows` that `path` does not hold, sharing `seconds`; gpu_stages.LOST if the
    GPU is."""
    file = File(path, resume)
    file.save()
    have = {key(row) for row in file.rows}
    left = [row for row in rows if key(row) not in have]
    end, watch = time.monotonic() + seconds, gpu.Watch()
    try:
        for i, row in enumerate(left):
            start = time.monotonic()
            lost = False
            try:
                share = max(0.0, end - start) / (len(left) - i)
                done = run_row(row, file.save, share, watch.since_last)
            except gpu_run.DeviceLost as error:
                lost, done = True, (read(path) or {"rows": [row]})["rows"][-1]
                done["reason"] += f" ({error})"
            took = time.monotonic() - start
            file.rows.append(done | {"took": took})
            file.save()
            if lost or not _alive():
                return gpu_stages.LOST
            name = f"{done['model']} {done['precision']} {TF32[done['tf32']]}"
            words = f"[{len(file.rows)}/{len(rows)}] {name}: {done['status']} {took:.1f} s"
            print(words, file=sys.stderr, flush=True)
    finally:
        watch.close()
    return 0


def _alive() -> bool:
    """Whether the GPU still works for this process; if so, it is empty now."""
    try:
        gpu_run.answers()
        release()
    except (gpu_run.DeviceLost, RuntimeError):
        return False
    return True


def run_all(
    models: list[str], precisions: list[str], path: Path, *, batch: int | None, seconds: float
) -> list[Row]:
    """Run the rows in processes, as many as it takes; the rows, those never reached included."""
    path.unlink(missing_ok=True)  # an old result must not pass for a new one
    end = time.monotonic() + seconds
    command = [sys.executable, "-m", "mixprec.bench", "vision-rows", "--out", str(path)]
    command += ["--models", ",".join(models), "--precisions", ",".join(precisions)]
    command += ["--batch", str(batch)] if batch else []
    have, idle = 0, 0
    while idle < IDLE:
        left = max(end - time.monotonic(), 1.0)
        more = ["--seconds", f"{left:.1f}", *(["--resume"] if path.exists() else [])]
        last = time.monotonic() + 1.1 * left + GRACE
        status = gpu_stages.watched([*command, *more], path, last=last)
        if status == 0 or time.monotonic() > end:
            break
        print(f"vision: the process ended with status {status}; going on", file=sys.stderr)
        before, have = have, len((read(path) or {"rows": []})["rows"])
        idle = idle + 1 if have == before else 0
    return _complete(plan(models, precisions, batch), path)


def _complete(rows: list[Row], path: Path) -> list[Row]:
    """Add the rows that were never reached to the file; all of its rows."""
    content = read(path)
    found = [] if content is None else content["rows"]
    have = {key(row) for row in found}
    missing = [row for row in rows if key(row) not in have]
    if content is None:
        where = environment(quick=False) | {"rehearsal": gpu.REHEARSAL, "gpu_name": gpu.name()}
        missing = [row | {"reason": "the program did not start"} for row in missing]
        results.save(path, where, missing)
    elif missing:
        kept = {k: v for k, v in content.items() if k not in ("schema", "environment", "rows")}
        results.save(path, content["environment"], found + missing, **kept)
    return found + missing


def cells(row: Row, rival: float | None) -> tuple[str, ...]:
    """One line of the table. rival: images/s of torch.autocast in bf16."""
    first = (row["model"], row["precision"], TF32[row["tf32"]], str(row["batch"]))
    if row["status"] != "ok":
        return *first, row["status"].upper(), "", "", ""
    speed, most = row["images_per_s"], row["largest_batch"]
    against = "" if rival is None else f"{speed / rival:.2f}x"
    full = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    largest_ = f">= {most}" if row["largest_batch_bounded"] else str(most)
    return *first, f"{speed:,.0f}", against, full, largest_


def show(rows: list[Row]) -> int:
    """Print the table and the reasons; 1 if a row is wrong or failed."""
    rivals = [row for row in rows if row["precision"] == "autocast-bf16"]
    speeds = {row["model"]: row["images_per_s"] for row in rivals}
    lines = [cells(row, speeds.get(row["model"])) for row in rows]
    print(*table.plain(lines, HEADER), sep="\n")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            words = f"{row['status'].upper()}: {row['reason']}"
            tf32 = " with TF32" if row["tf32"] else ""
            reasons.setdefault(words, []).append(f"{row['model']} {row['precision']}{tf32}")
    for words, names in reasons.items():
        print(f"{', '.join(names)}: {words}")
    return 1 if any(row["status"] in ("wrong", "failed") for row in rows) else 0
