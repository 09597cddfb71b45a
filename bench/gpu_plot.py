"""Pictures of a GPU: the roofline with what was reached under it, and ratios to rivals."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from . import gpu
from .registry import FLOOR
from .results import ResultError
from .sources import CHOSEN

COLORS = {"cuda": "#2a7f62", "triton": "#3a6ea5", "vendor": "#8a6fae", CHOSEN: "#333333"}
OTHERS = "#d1803c"
_LONGEST_LIST = 60
# In the order of their worth: where two would stand too close, the later one is left out.
_TICKS = (
    *(1.0, 2.0, 0.5, 5.0, 0.2, 10.0, 0.1, 1.4, 0.7),
    *(1.2, 0.8, 1.1, 0.9, 3.0, 0.3, 1.7, 30.0, 0.03),
)
_TICKS_APART = 0.05  # of the width


def save(contents: list[dict[str, Any]], path: Path) -> list[Path]:
    """Draw the rows of result files of one GPU: PATH-roofline.png and PATH-ratio.png.

    ResultError without matplotlib or without a measured row; OSError if a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ResultError("plot: matplotlib is not installed: pip install matplotlib") from None
    rows = drawable(contents)
    if not rows:
        raise ResultError("plot: the file holds no measured row")
    environment = contents[0]["environment"]
    words = "a rehearsal: these figures mean nothing" if environment.get("rehearsal") else ""
    title = f"{environment.get('gpu_name') or 'no GPU'}, torch {environment.get('torch')} {words}"
    written = []
    for kind, draw, height in (
        ("roofline", _roofline, 6.0),
        ("ratio", _ratio, 1.6 + 0.26 * len(_judged(rows)[:_LONGEST_LIST])),
    ):
        figure = Figure(figsize=(10, height), layout="constrained")
        axes = figure.subplots()
        draw(axes, rows, gpu.ceiling(environment.get("gpu_name")))
        axes.set_title(title, fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        target = path.with_name(f"{path.stem}-{kind}.png")
        _write(figure, target)
        written.append(target)
    return written


def drawable(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a picture shows: measured, and not about Python's time."""
    return [r for c in contents for r in c["rows"] if r["status"] == "ok" and not r["host"]]


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".png")
    os.close(descriptor)
    try:
        figure.savefig(temporary, dpi=150)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _timed(row: dict[str, Any]) -> dict[str, float]:
    """Seconds by variant."""
    return {b: v["seconds"] for b, v in row["variants"].items() if v["status"] == "ok"}


def _roofline(axes: Any, rows: list[dict[str, Any]], peak: gpu.Ceiling | None) -> None:
    """Products: TFLOP/s over operations per byte. Kernels without operations: their bytes per
    second, as if each byte were one operation, at 1."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        work = row["flops"] or row["bytes"]
        for name, seconds in _timed(row).items():
            points.setdefault(name, []).append((work / row["bytes"], work / seconds))
        for name, seconds in row["median"].items():
            if name not in ("ours", FLOOR):
                points.setdefault("rivals", []).append((work / row["bytes"], work / seconds))
    everything = [x for group in points.values() for x, _ in group]
    for name, group in points.items():
        x, y = zip(*group, strict=True)
        marker = "x" if name == "rivals" else "o"
        axes.scatter(x, y, s=18, color=COLORS.get(name, OTHERS), label=name, marker=marker)
    if peak is not None:
        edges = [0.5, *(f / peak.bytes for f in (peak.flops16, peak.flops8))]
        edges.append(max(2 * edges[-1], *everything))
        for flops, label in ((peak.flops16, "16-bit"), (peak.flops8, "fp8")):
            roof = [min(peak.bytes * x, flops) for x in edges]
            axes.plot(edges, roof, color="#333333", linewidth=1)
            axes.annotate(f"{label}: {flops / 1e12:.0f} TFLOP/s", (edges[-1], flops), (0, 3),
                          textcoords="offset points", ha="right", size=8)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte moved (kernels that only move bytes: at 1)")
    axes.set_ylabel("operations per second (at 1: bytes per second)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _judged(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Rows with a rival, and the seconds of the best one; the worst ratio first."""
    found = []
    for row in rows:
        rivals = [s for n, s in row["median"].items() if n not in ("ours", FLOOR)]
        if rivals and _timed(row):
            found.append((row, min(rivals)))
    return sorted(found, key=lambda pair: pair[1] / pair[0]["median"]["ours"])


def _ticks(low: float, high: float) -> list[float]:
    """Those between low and high (and 0.9 to 1.1 in any case) that have room on a log axis."""
    low, high = min(low, 0.9), max(high, 1.1)
    found: list[float] = []
    for tick in (t for t in _TICKS if low <= t <= high):
        apart = (abs(math.log(tick / other)) / math.log(high / low) for other in found)
        if all(gap >= _TICKS_APART for gap in apart):
            found.append(tick)
    return sorted(found)


def _ratio(axes: Any, rows: list[dict[str, Any]], peak: gpu.Ceiling | None) -> None:
    """How many times as fast as the best rival each variant is, the worst on top."""
    every = _judged(rows)
    judged = every[:_LONGEST_LIST]
    seen: set[str] = set()
    for place, (row, rival) in enumerate(judged):
        for name, seconds in _timed(row).items():
            label = None if name in seen else name
            seen.add(name)
            axes.scatter(rival / seconds, place, s=22, color=COLORS.get(name, OTHERS), label=label)
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.set_yticks(
        range(len(judged)), [r["name"].removeprefix("cuda/") for r, _ in judged], fontsize=8
    )
    axes.set_ylim(len(judged) - 0.5, -0.5)  # the first on top
    axes.set_xscale("log")
    ticks = _ticks(*axes.get_xlim())
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    of = f"; the {len(judged)} worst of {len(every)} rows" if len(judged) < len(every) else ""
    words = f"times as fast as the best rival (1: equally fast; to the right is better{of})"
    axes.set_xlabel(words)
    axes.grid(axis="y", linewidth=0.3)
    if seen:
        axes.legend(frameon=False, fontsize=8)
