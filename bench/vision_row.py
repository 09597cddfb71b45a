"""One row of the vision models: values first, then speed, peak memory and the largest batch."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from . import gpu, gpu_run, gpu_timer
from .registry import NotMeasured
from .vision_memory import can_step, guess, peak, release
from .vision_models import MODELS, Batch, find
from .vision_search import largest
from .vision_step import PRECISIONS, Trainer, switches, wrong

HOT = 3.0  # seconds of warming up, where a row has the time
BATCHES = 4  # of random images, in turns
QUEUED = 4  # steps between two waits for the device
SAMPLES = 40
STEP = 8  # the largest batch is a multiple of it
MOST = 1 << 15
DIED = "the program died or hung while it ran"
Row = dict[str, Any]


def plan(models: list[str], precisions: list[str], batch: int | None) -> list[Row]:
    """The rows to measure, in order, before anything is known of them."""
    blank: Row = {
        **{"params": None, "images_per_s": None, "samples": []},
        **{"peak_bytes": None, "largest_batch": None, "largest_batch_bounded": False},
        **{"status": "not measured", "reason": "out of time"},
    }
    return [
        {
            **{"model": model, "precision": PRECISIONS[p].label, "tf32": PRECISIONS[p].tf32},
            **{"source": " or ".join(MODELS[model].make)},
            **{"batch": batch or (2 if gpu.REHEARSAL else MODELS[model].batch)},
            **blank,
        }
        for model in models
        for p in precisions
    ]


def key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["precision"], row["tf32"]


@cache
def _reference(name: str, count: int, updates: int) -> list[float]:
    """The losses of FP32 without TF32."""
    _, make = find(name)
    with switches(tf32=False, benchmark=False):
        return Trainer(name, make, PRECISIONS["fp32"]).losses(count, updates)


def run_row(
    row: Row,
    told: Callable[[Row], None],
    seconds: float,
    watched: Callable[[], dict[str, list[float]]] = dict,
) -> Row:
    """Measure one row of `plan` in about `seconds`.

    told: of the row as it stands, before anything that may end the process. watched: clocks and
    power since it was last called. An exception is the row's result, except gpu_run.DeviceLost,
    which is raised.
    """
    until = time.monotonic() + seconds
    row = row | {"status": "failed", "reason": DIED}
    told(row)
    precision = next(p for p in PRECISIONS.values() if key(row)[1:] == (p.label, p.tf32))
    try:
        row["source"], make = find(row["model"])
        check = (4, 2) if gpu.REHEARSAL else (32, 8)  # images, updates
        reference = _reference(row["model"], *check)
        with switches(tf32=bool(precision.tf32), benchmark=False):
            reason = wrong(Trainer(row["model"], make, precision).losses(*check), reference)
            if reason is not None:
                return row | {"status": "wrong", "reason": reason}
            release()
            trainer = Trainer(row["model"], make, precision)
            row["params"] = sum(p.numel() for p in trainer.model.parameters())
            told(row)
            row |= _timed(trainer, row["batch"], 0.5 * (until - time.monotonic()), watched)
            return row if row["status"] != "ok" else _searched(trainer, row, until, told)
    except NotMeasured as error:
        return row | {"status": "not measured", "reason": str(error)}
    except gpu_run.DeviceLost:
        raise
    except Exception as error:  # one precision must not hide the others
        return row | {"status": "failed", "reason": gpu_run.one_line(error)}


def _timed(
    trainer: Trainer, count: int, seconds: float, watched: Callable[[], dict[str, list[float]]]
) -> Row:
    """Peak and speed. The peak is taken with one batch on the device, the others come after it."""
    clock = gpu_run.clock()
    batches = [trainer.batch(count)]
    samples: list[float] = []
    with switches(tf32=bool(trainer.precision.tf32), benchmark=True):
        for _ in range(2):  # the state of the optimizer is made, convolutions are chosen
            trainer.step(batches[0])
        most = peak(trainer, batches[0])
        batches += [trainer.batch(count, seed) for seed in range(1, BATCHES)]
        hot = clock.host() + (0.0 if gpu.REHEARSAL else min(HOT, seconds / 3))
        while clock.host() < hot:
            queued(trainer, batches, clock)
        watched()  # from here on
        end = clock.host() + seconds / 2
        least = QUEUED if gpu.REHEARSAL else gpu_timer.MIN_SAMPLES
        while len(samples) < least or (len(samples) < SAMPLES and clock.host() < end):
            samples += queued(trainer, batches, clock)
    noted = watched()
    loss, scale = trainer.step(batches[0]).item(), trainer.scaler.get_scale()
    if not math.isfinite(loss) or scale < 1:  # steps that were skipped are no steps
        reason = f"after {len(samples)} steps the loss is {loss}, its scale {scale}"
        return {"status": "wrong", "reason": reason}
    return {
        "images_per_s": count / statistics.median(samples),
        "samples": [float(f"{s:.6g}") for s in samples],
        "watched": noted,
        "peak_bytes": most,
        "status": "ok",
        "reason": "",
    }


def queued(trainer: Trainer, batches: list[Batch], clock: gpu_timer.Clock) -> list[float]:
    """Seconds of each of QUEUED steps. One more comes before them, because the device is idle
    until that is queued."""
    marks = []
    for i in range(QUEUED + 1):
        trainer.step(batches[i % len(batches)])
        marks.append(clock.mark())
    clock.synchronize()
    return [clock.between(a, b) for a, b in itertools.pairwise(marks)]


def _searched(trainer: Trainer, row: Row, until: float, told: Callable[[Row], None]) -> Row:
    """largest_batch and what goes with it; on the way, `told` has the largest so far."""
    row = row | {"largest_batch": row["batch"], "largest_batch_bounded": True}
    trying = 0

    def fits(count: int) -> bool:
        nonlocal trying
        trying = count
        told(row | {"reason": f"{DIED}: a step of {count} images"})
        fine = can_step(trainer, count)
        row["largest_batch"] = max(row["largest_batch"], count if fine else 0)
        return fine

    most = 4 * row["batch"] if gpu.REHEARSAL else MOST
    try:
        first = guess(row["batch"], row["peak_bytes"])
        found = largest(fits, row["batch"], step=STEP, until=until, most=most, guess=first)
    except Exception as error:  # not for want of memory: what was timed stays
        gpu_run.answers()
        return row | {"reason": f"a step of {trying} images: {gpu_run.one_line(error)}"}
    return row | {"largest_batch": found.batch, "largest_batch_bounded": found.bounded}
