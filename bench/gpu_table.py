"""The results of a GPU as tables: one line per row and variant, and one per family of products."""

from __future__ import annotations

import math
import statistics
from typing import Any

from . import gpu
from .registry import quantity
from .table import duration, target

HEADER = (
    *("row", "variant", "time", "rate", "of peak", "of a copy", "best rival", "", "result"),
    *("target", "met", "call"),
)
FAMILY_HEADER = ("family", "variant", "against", "shapes", "geomean", "least", "most", "best rate")


def rate(row: dict[str, Any], seconds: float) -> str:
    """TFLOP/s where the row counts operations, else GB/s."""
    if row["host"]:
        return ""
    if row["flops"]:
        return f"{row['flops'] / seconds / 1e12:.3g} TFLOP/s"
    return f"{row['bytes'] / seconds / 1e9:,.0f} GB/s"


def of_peak(row: dict[str, Any], seconds: float, peak: gpu.Ceiling | None) -> str:
    """The share of what the hardware could do at most, whichever of its limits is nearer."""
    if peak is None or row["host"]:
        return ""
    arithmetic = peak.flops8 if "/fp8/" in row["name"] else peak.flops16
    floor = max(row["bytes"] / peak.bytes, row["flops"] / arithmetic)
    return f"{floor / seconds:.0%}"


def _share(row: dict[str, Any], share: float | None) -> str:
    if share is None:
        return ""
    want = row["share_target"]
    return f"{share:.0%}" + (f" (>= {want:.0%})" if want else "")


def lines(row: dict[str, Any], peak: gpu.Ceiling | None = None) -> list[tuple[str, ...]]:
    """One line per variant that was timed or went wrong; one for a row without any."""
    if row["status"] != "ok":
        return [(row["name"], *[""] * 7, row["status"].upper(), target(row), "-", "")]
    rival = row["best_rival"]
    against = (duration(row["median"][rival]), rival) if rival else ("", "")
    if not row["variants"]:
        seconds = row["median"]["ours"]
        cells = (duration(seconds), rate(row, seconds), of_peak(row, seconds, peak))
        return [(row["name"], "torch", *cells, *[""] * 7)]
    found = []
    for backend, variant in row["variants"].items():
        name = backend + ("*" if backend == row["default"] and len(row["variants"]) > 1 else "")
        if variant["status"] in ("wrong", "failed"):
            status = variant["status"].upper()
            found.append((row["name"], name, *[""] * 6, status, target(row), "-", ""))
        elif variant["status"] == "ok":
            seconds, figure = variant["seconds"], variant["figure"]
            result = "" if figure is None else quantity(figure, row["target"]["unit"])
            found.append(
                (
                    *(row["name"], name, duration(seconds), rate(row, seconds)),
                    *(of_peak(row, seconds, peak), _share(row, variant["share"]), *against),
                    *(result, target(row), "yes" if variant["met"] else "no"),
                    duration(variant["call"]),
                )
            )
    return found


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Why a row or a variant has no figures, each reason once with the rows that it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            reasons.setdefault(f"{row['status'].upper()}: {row['reason']}", []).append(row["name"])
            continue
        for backend, variant in row["variants"].items():
            if variant["status"] != "ok":
                words = f"{backend} {variant['status']}: {variant['reason']}"
                reasons.setdefault(words, []).append(row["name"])
        for rival, reason in row["rivals_refused"].items():
            reasons.setdefault(f"{rival} did not run: {reason}", []).append(row["name"])
        for name in row["waits"]:
            words = f"{name} waits for Python between its kernels, and its time holds that"
            reasons.setdefault(words, []).append(row["name"])
    return [f"{_shortened(names)}: {words}" for words, names in reasons.items()]


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def bad(rows: list[dict[str, Any]]) -> int:
    """How many rows, or variants of rows, gave wrong values or failed."""
    broken = ("wrong", "failed")
    count = 0
    for row in rows:
        variants = row.get("variants", {}).values()
        count += sum(v["status"] in broken for v in variants) or row["status"] in broken
    return count


def families(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Over the shapes of each kind of product: geometric mean, least and most of the ratio to
    every rival, and the best rate."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["status"] != "ok" or not row["flops"]:
            continue
        family = row["name"].rsplit("/", 1)[0]
        for backend, variant in row["variants"].items():
            if variant["status"] != "ok":
                continue
            for rival, seconds in row["median"].items():
                if rival != "ours":
                    pair = seconds / variant["seconds"], row["flops"] / variant["seconds"]
                    groups.setdefault((family, backend, rival), []).append(pair)
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
    """n of N targets met by the variant that a user gets; rows without a target do not count."""
    counted = [r for r in rows if r["target"] is not None and r["status"] != "not measured"]
    missing = sum(r["status"] == "not measured" for r in rows)
    words = f"{sum(r['met'] for r in counted)} of {len(counted)} targets met"
    words += f", {missing} rows not measured" if missing else ""
    return words + (f", {bad(rows)} wrong or failed" if bad(rows) else "")
