"""One row after another: values checked, then timed, then judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import timer
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


def measure(row: Row, *, samples: int, min_time: float) -> dict[str, Any]:
    """Measure one row. A case whose values are wrong is not timed; an exception is its result."""
    result: dict[str, Any] = {
        "name": row.name,
        "op": row.op,
        "what": row.what,
        "device": row.device,
        "status": "ok",
        "reason": "",
        "target": {
            "value": row.target.value,
            "unit": row.target.unit,
            "at_least": row.target.at_least,
        },
        "met": False,
    }
    try:
        if row.device != "cpu" and not torch.get_device_module(row.device).is_available():
            raise NotMeasured(f"this machine has no {row.device} device that torch can use")
        case = row.make()
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
    except NotMeasured as reason:
        return result | {"status": "not measured", "reason": str(reason)}
    except Exception as error:  # one broken row must not hide the others
        lines = str(error).strip().splitlines() or ["no message"]
        return result | {"status": "failed", "reason": f"{type(error).__name__}: {lines[0]}"}
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
