"""Bars: how far each row is from its target."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .registry import quantity
from .results import ResultError
from .table import summary, target

LONGEST = 4.0  # a bar far beyond its target would squeeze the others; its label has the figure


def reached(row: dict[str, Any]) -> float:
    """1 at the target, more is better, whichever way the target points."""
    value = row["target"]["value"]
    return row["figure"] / value if row["target"]["at_least"] else value / row["figure"]


def save(content: dict[str, Any], path: Path) -> None:
    """Draw the rows of a result file as a PNG, written whole or not at all.

    ResultError without matplotlib or without a measured row; OSError if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ResultError("plot: matplotlib is not installed: pip install matplotlib") from None
    rows = [row for row in content["rows"] if row["status"] == "ok"]
    if not rows:
        raise ResultError("plot: the file holds no measured row")
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    colors = ["#2a7f62" if row["met"] else "#d1803c" for row in rows]
    lengths = [min(reached(row), LONGEST) for row in rows]
    axes.barh(places, lengths, color=colors, height=0.7)
    axes.axvline(1.0, color="#333333", linewidth=1)
    for place, row, length in zip(places, rows, lengths, strict=True):
        text = f"{quantity(row['figure'], row['target']['unit'])}  (target {target(row)})"
        axes.annotate(
            text,
            (length, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            size=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the line at 1
        )
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * max(1.0, *lengths))
    axes.set_xlabel(
        f"result / target (1 = target reached, longer is better; bars end at {LONGEST:g})"
    )
    environment = content["environment"]
    axes.set_title(
        f"{summary(rows)}\n{environment.get('processor')}, {environment.get('threads')} threads, "
        f"{environment.get('isa')}, torch {environment.get('torch')}",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
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
