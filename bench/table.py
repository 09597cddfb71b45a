"""Results as tables: a line per case and variant, and one per family of products."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .cases.registry import COPY, baselines, best_baseline, quantity
from .device import Peak
from .timing.run import BROKEN

Line = tuple[str, ...]
HEADER = (
    *("case", "variant", "time", "rate", "of peak", "of a copy", "best baseline", "by", "result"),
    *("target", "met", "call"),
)
FAMILY_HEADER = ("family", "variant", "against", "shapes", "geomean", "least", "most", "best rate")


def duration(seconds: float) -> str:
    """Three figures and a unit: 7.23 us, 812 us, 13.3 ms, 1.25 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate(row: dict[str, Any], seconds: float) -> str:
    """Work per second: operations where the case counts them, else bytes, else nothing."""
    if row.get("host"):
        return ""
    if row["flops"]:
        unit, factor = ("TFLOP/s", 1e12) if row["flops"] / seconds >= 1e12 else ("GFLOP/s", 1e9)
        return f"{row['flops'] / seconds / factor:.3g} {unit}"
    if not row["bytes"]:
        return ""
    speed = row["bytes"] / seconds / 1e9
    return f"{speed:.3g} GB/s" if speed < 1000 else f"{speed:,.0f} GB/s"


def of_peak(row: dict[str, Any], seconds: float, peak: Peak | None) -> str:
    """The share of what the hardware could do at most, whichever of its limits is nearer."""
    if peak is None or row.get("host"):
        return ""
    arithmetic = peak.flops8 if "/fp8/" in row["name"] else peak.flops16
    least = max(row["bytes"] / peak.bytes, row["flops"] / arithmetic)
    return f"{least / seconds:.0%}"


def of_a_copy(row: dict[str, Any], seconds: float) -> str:
    """The speed as a share of that of a plain copy of the same bytes, measured beside it."""
    if COPY not in row["median"]:
        return ""
    want = row.get("share_target")
    return f"{row['median'][COPY] / seconds:.0%}" + (f" (>= {want:.0%})" if want else "")


def target(row: dict[str, Any]) -> str:
    want = row["target"]
    if want is None:
        return ""
    return f"{'>=' if want['at_least'] else '<='} {quantity(want['value'], want['unit'])}"


def lines(row: dict[str, Any], peak: Peak | None = None) -> list[Line]:
    """One line per variant that was timed or went wrong; one for a case without any."""

    def line(variant: str, cells: Line, met: str, call: str = "") -> Line:
        return (row["name"], variant, *cells, target(row), met, call)

    def measured(variant: str, seconds: float, found: dict[str, Any], call: str = "") -> Line:
        best = best_baseline(row["median"])
        result = "" if found["figure"] is None else quantity(found["figure"], row["target"]["unit"])
        cells = (
            *(duration(seconds), rate(row, seconds), of_peak(row, seconds, peak)),
            *(of_a_copy(row, seconds), duration(row["median"][best]) if best else "", best or ""),
            result,
        )
        met = "" if row["target"] is None else "yes" if found["met"] else "no"
        return line(variant, cells, met, call)

    if row["status"] != "ok":
        return [line("", ("",) * 6 + (row["status"].upper(),), "-")]
    variants = row.get("variants") or {}
    if not variants:
        return [measured("", row["median"]["ours"], row)]
    found = []
    for backend, one in variants.items():
        name = backend + ("*" if backend == row["default"] and len(variants) > 1 else "")
        if one["status"] in BROKEN:
            found.append(line(name, ("",) * 6 + (one["status"].upper(),), "-"))
        elif one["status"] == "ok":
            found.append(measured(name, one["seconds"], one, duration(one["call"])))
    return found


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Why a case or a variant has no figures, each reason once with the cases that it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            reasons.setdefault(f"{row['status'].upper()}: {row['reason']}", []).append(row["name"])
            continue
        for backend, variant in (row.get("variants") or {}).items():
            if variant["status"] != "ok":
                message = f"{backend} {variant['status']}: {variant['reason']}"
                reasons.setdefault(message, []).append(row["name"])
        for name, reason in row.get("baselines_refused", {}).items():
            reasons.setdefault(f"{name} did not run: {reason}", []).append(row["name"])
        for name in row.get("waits", ()):
            message = f"{name} waits for Python between its kernels, and its time holds that"
            reasons.setdefault(message, []).append(row["name"])
    return [f"{_shortened(names)}: {message}" for message, names in reasons.items()]


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def bad(rows: list[dict[str, Any]]) -> int:
    """How many cases, or variants of cases, gave wrong values or failed."""
    count = 0
    for row in rows:
        variants = (row.get("variants") or {}).values()
        count += sum(v["status"] in BROKEN for v in variants) or row["status"] in BROKEN
    return count


def families(rows: list[dict[str, Any]]) -> list[Line]:
    """Over the shapes of each kind of product on a GPU: geometric mean, least and most of the ratio
    to every baseline, and the best rate."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["status"] != "ok" or not row["flops"]:
            continue
        family = row["name"].rsplit("/", 1)[0]
        for backend, variant in (row.get("variants") or {}).items():
            if variant["status"] != "ok":
                continue
            for name, seconds in baselines(row["median"]).items():
                pair = seconds / variant["seconds"], row["flops"] / variant["seconds"]
                groups.setdefault((family, backend, name), []).append(pair)
    return [
        (
            *(*key, str(len(pairs))),
            f"{math.exp(statistics.fmean(math.log(r) for r, _ in pairs)):.3g}x",
            f"{min(r for r, _ in pairs):.3g}x",
            f"{max(r for r, _ in pairs):.3g}x",
            f"{max(f for _, f in pairs) / 1e12:.3g} TFLOP/s",
        )
        for key, pairs in groups.items()
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """n of N targets met by the variant that a user gets; a wrong or failed case counts as missed,
    one not measured, or without a target, not at all."""
    counted = [r for r in rows if r["target"] is not None and r["status"] != "not measured"]
    missing = sum(r["status"] == "not measured" for r in rows)
    text = f"{sum(r['met'] for r in counted)} of {len(counted)} targets met"
    text += f", {missing} not measured" if missing else ""
    return text + (f", {bad(rows)} wrong or failed" if bad(rows) else "")


def full(header: Line, body: list[Line]) -> tuple[Line, list[Line]]:
    """Without the columns in which nothing stands."""
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] for line in body)]
    return tuple(header[i] for i in kept), [tuple(line[i] for i in kept) for line in body]


def plain(header: Line, body: list[Line]) -> list[str]:
    """Aligned columns, two spaces apart."""
    header, body = full(header, body)
    everything = [header, *body]
    widths = [max(len(line[i]) for line in everything) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in everything
    ]


def markdown(header: Line, body: Sequence[Line]) -> str:
    everything = [header, tuple("---" for _ in header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in everything)


def show(rows: list[dict[str, Any]], peak: Peak | None = None) -> None:
    """Print the table and the remarks."""
    body = [line for row in rows for line in lines(row, peak)]
    for text in [*plain(HEADER, body), *remarks(rows)]:
        print(text)
