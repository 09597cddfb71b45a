"""The measurements of a Monitor on the host: plain dicts, a table, JSON lines, scalars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...amp.rules import power
from ..report_table import aligned
from .measure import FIELDS, decibels

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_NAME = 24  # columns of the table for a layer's name; 80 in all

Key = tuple[int, str, str, str, str]  # step, layer, tensor, format, granularity
Record = dict[str, Any]


def add(
    records: list[Record],
    samples: Sequence[tuple[Key, Sequence[float]]],
    scalars: Sequence[tuple[int, str, float]],
) -> None:
    """Append one record for each step that ended; tensors of a step that has a record join it."""
    by_step = {record["step"]: record for record in records[-1:]}

    def of_step(step: int) -> Record:
        if step not in by_step:
            by_step[step] = {"step": step, "loss_scale": None, "skipped_steps": None, "clipped": {}}
            by_step[step]["tensors"] = []
            records.append(by_step[step])
        return by_step[step]

    merged: dict[Key, tuple[int, list[float]]] = {}
    for key, values in samples:
        calls, before = merged.get(key, (0, []))
        merged[key] = calls + 1, _merge(before, values) if calls else list(values)
    for key, (calls, values) in merged.items():
        of_step(key[0])["tensors"].append(_tensor(key, calls, values))
    for step, name, value in scalars:
        record = of_step(step)
        if name.startswith("clipped/"):
            record["clipped"][name.removeprefix("clipped/")] = int(value)
        elif name:
            record[name] = int(value) if name == "skipped_steps" else value


def _merge(a: Sequence[float], b: Sequence[float]) -> list[float]:
    merged = [x + y for x, y in zip(a, b, strict=True)]
    amax, low, high = (FIELDS.index(name) for name in ("amax", "scale_min", "scale_max"))
    nan = math.isnan(a[amax]) or math.isnan(b[amax])
    merged[amax] = math.nan if nan else max(a[amax], b[amax])
    merged[low], merged[high] = min(a[low], b[low]), max(a[high], b[high])
    return merged


def _tensor(key: Key, calls: int, values: Sequence[float]) -> Record:
    sums = dict(zip(FIELDS, values, strict=True))
    elements = sums["elements"]

    def share(count: float) -> float | None:
        return None if math.isnan(count) or not elements else count / elements

    measured = not math.isnan(sums["overflow"]) or key[2] != "y"
    return {
        "layer": key[1],
        "tensor": key[2],
        "format": key[3],
        "granularity": key[4] or None,
        "calls": calls,
        "elements": int(elements),
        "amax": sums["amax"],
        "scale_min": sums["scale_min"],
        "scale_max": sums["scale_max"],
        "overflow": share(sums["overflow"]),
        "underflow": share(sums["underflow"]),
        "inf": int(sums["inf"]),
        "nan": int(sums["nan"]),
        "sqnr": decibels(sums["signal"], sums["noise"]) if measured else None,
    }


def badness(row: Record) -> tuple[float, ...]:
    """Larger is worse: Inf and NaN, then overflow, underflow, and a low SQNR."""
    sqnr = row["sqnr"]
    lost = -math.inf if sqnr is None else math.inf if math.isnan(sqnr) else -sqnr
    wrong = row["inf"] + row["nan"]
    return (wrong / max(1, row["elements"]), row["overflow"] or 0.0, row["underflow"] or 0.0, lost)


def table(record: Record, limit: int | None) -> str:
    """One record as text: a line for the step, then a line for each tensor, the worst first."""
    parts = [f"step {record['step']}"]
    if record["loss_scale"] is not None:
        parts.append(f"loss scale {power(record['loss_scale'])}")
    if record["skipped_steps"] is not None:
        parts.append(f"{record['skipped_steps']} steps skipped")
    if clipped := sum(record["clipped"].values()):
        parts.append(f"{clipped:,} activations clipped")
    rows = sorted(record["tensors"], key=badness, reverse=True)
    header = ("layer", "cast", "amax", "scale", "over", "under", "inf/nan", "SQNR")
    cells = [header, *(tuple(_cells(row)) for row in rows[:limit])]
    if not any(row["sqnr"] is not None and math.isfinite(row["sqnr"]) for row in rows):
        cells = [line[:-1] for line in cells]
    lines = [", ".join(parts), *aligned(cells, left=(0, 1))]
    if limit is not None and len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more")
    return "\n".join(lines)


def _cells(row: Record) -> Iterator[str]:
    name = row["layer"] or "(the model)"
    yield name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    yield f"{row['tensor']} {row['format']}"
    yield f"{row['amax']:.3g}"
    low, high = power(row["scale_min"]), power(row["scale_max"])
    yield low if low == high else f"{low}..{high}"
    for share in (row["overflow"], row["underflow"]):
        yield "-" if share is None else _percent(share)
    yield "/".join(f"{row[n]:.3g}" for n in ("inf", "nan")) if row["inf"] or row["nan"] else "0"
    yield "-" if row["sqnr"] is None else f"{row['sqnr']:.1f}"


def _percent(share: float) -> str:
    if not share:
        return "0"
    return f"{share:.2%}" if share >= 1e-4 else f"{100 * share:.1g}%"


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in `record` that is not None."""
    for name in ("loss_scale", "skipped_steps"):
        if record[name] is not None:
            yield name, record[name]
    for layer, count in record["clipped"].items():
        yield f"clipped/{layer}", count
    for row in record["tensors"]:
        for name in ("amax", "scale_min", "scale_max", "overflow", "underflow", "sqnr"):
            if row[name] is not None:
                yield f"{name}/{row['tensor']}/{row['layer']}", row[name]
        yield f"not_finite/{row['tensor']}/{row['layer']}", row["inf"] + row["nan"]
