"""One row after another: values checked, then timed, then judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import gpu, gpu_run, timer
from .registry import FLOOR, Case, NotMeasured, Row, best_rival

# What a row can come to. Only "ok" has figures; "wrong" and "failed" make the run fail.
STATUSES = ("ok", "wrong", "failed", "not measured")


def run_rows(
    rows: Iterable[Row], *, samples: int, min_time: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure `rows` in order; each result is a dict of plain values, ready for JSON."""
    results = []
    for row in rows:
        progress(row.name)
        results.append(measure(row, samples=samples, min_time=min_time))
    return results


def heading(row: Row) -> dict[str, Any]:
    """What a result says before anything is known."""
    target = row.target
    return {
        "name": row.name,
        "op": row.op,
        "what": row.what,
        "device": row.device,
        "status": "ok",
        "reason": "",
        "target": None
        if target is None
        else {"value": target.value, "unit": target.unit, "at_least": target.at_least},
        "share_target": row.share,
        "met": False,
    }


def measure(
    row: Row, *, samples: int, min_time: float = 0.02, seconds: float = 10.0, **more: Any
) -> dict[str, Any]:
    """Measure one row. A case whose values are wrong is not timed; an exception is its result.

    A row of the GPU may take `seconds`, and then has fewer samples; more: of gpu_run.measure.
    """
    result = heading(row)
    try:
        if row.device != "cpu" and not (gpu.REHEARSAL or torch.cuda.is_available()):
            raise NotMeasured(f"this machine has no {row.device} device that torch can use")
        case = row.make()
        if isinstance(case, gpu_run.GpuCase):
            return result | gpu_run.measure(row, case, samples=samples, seconds=seconds, **more)
        assert row.target is not None, "a row of the CPU has a target"
        wrong = case.check()
        if wrong is not None:
            return result | {"status": "wrong", "reason": wrong}
        times = timer.interleave(
            {"ours": case.ours, **case.rivals, **_floor(case, row.device)},
            samples=samples,
            min_time=min_time,
            device=row.device,
            external=case.external,
        )
    except gpu_run.DeviceLost:
        raise
    except NotMeasured as reason:
        return result | {"status": "not measured", "reason": str(reason)}
    except Exception as error:  # one broken row must not hide the others
        return result | {"status": "failed", "reason": gpu_run.one_line(error)}
    medians = timer.medians(times)
    figure = row.target.figure(medians)
    if not math.isfinite(figure):
        return result | {"status": "failed", "reason": f"the figure came out as {figure}"}
    return result | {
        "samples": times,
        "median": medians,
        "best_rival": best_rival(medians),
        "figure": figure,
        "met": row.target.met(figure),
        "flops": case.flops,
        "bytes": case.bytes,
    }


def _floor(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """A copy that reads and writes as many bytes as a case that only moves bytes, half each way."""
    if not case.bytes or case.flops:
        return {}
    source = torch.ones(int(case.bytes) // 8, device=device)
    target = torch.empty_like(source)
    return {FLOOR: lambda: target.copy_(source)}
