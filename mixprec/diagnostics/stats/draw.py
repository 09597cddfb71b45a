"""The picture of a Monitor's records: amax, scale and lost shares over the steps."""

from __future__ import annotations

import importlib
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._atomic import replace_file
from .records import Record

_NAMES = {"x": "activations x", "w": "weights w", "g": "gradients g"}
# Told apart by most colour-blind readers (Okabe and Ito, 2008).
_COLOURS = ("#D55E00", "#0072B2", "#009E73")
_OVERFLOW, _UNDERFLOW = "#D55E00", "#0072B2"
_WORST = len(_COLOURS)  # layers of each role that are named


def save(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    figure = draw(records)
    suffix = Path(path).suffix.removeprefix(".") or "png"
    replace_file(path, lambda temporary: figure.savefig(temporary, format=suffix, dpi=130))


def draw(records: Sequence[Record]) -> Any:
    """A matplotlib Figure: a column for each of x, w and g; a line for each layer, of which the
    three with the widest range of amax have a colour and a name."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")  # optional, and slow to import
    except ImportError as error:
        raise ImportError(
            f"Monitor.plot needs matplotlib ({error}): pip install 'mixprec[demo]'"
        ) from error
    figure = figure_module.Figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplots(3, 3, sharex=True, sharey="row", height_ratios=(3, 2, 2))
    figure.suptitle("What was cast: largest magnitude, scale, and what was lost")
    for column, (role, title) in enumerate(_NAMES.items()):
        above, middle, below = (axes[row][column] for row in range(3))
        above.set_title(title)
        lines = _by_layer(records, role)
        named = sorted(lines, key=lambda layer: _range(lines[layer]), reverse=True)[:_WORST]
        for layer, rows in lines.items():
            if layer not in named:
                _one(above, middle, rows, color="#bbbbbb", linewidth=0.8, zorder=1)
        for layer, colour in zip(named, _COLOURS, strict=False):
            short = layer if len(layer) <= 30 else "..." + layer[-27:]
            style = {"color": colour, "linewidth": 1.8, "marker": ".", "zorder": 2}
            _one(above, middle, lines[layer], label=short or "(the model)", **style)
        if named:
            others = len(lines) - len(named)
            above.legend(title=f"and {others} others in grey" if others else None, fontsize=8)
        _shares(below, lines)
        if role == "w":  # the one that hardly ever loses anything: there is room
            below.legend(fontsize=8)
        below.set_xlabel("training step")
        for ax in (above, middle):
            ax.set_yscale("log", base=2)
        for ax in (above, middle, below):
            ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("amax")
    axes[1][0].set_ylabel("scale (largest)")
    axes[2][0].set_ylabel("share of elements (%)")
    return figure


def _by_layer(records: Sequence[Record], role: str) -> dict[str, list[tuple[int, Record]]]:
    lines: dict[str, list[tuple[int, Record]]] = {}
    for record in records:
        for row in record["tensors"]:
            if row["tensor"] == role:
                lines.setdefault(row["layer"], []).append((record["step"], row))
    return lines


def _drawable(x: float) -> float:
    """A gap in the line where a logarithm has no place."""
    return x if math.isfinite(x) and x > 0 else math.nan


def _range(rows: list[tuple[int, Record]]) -> float:
    """How far amax wandered; what was not finite is the widest of all."""
    seen = [row["amax"] for _, row in rows]
    if not all(map(math.isfinite, seen)):
        return math.inf
    seen = [x for x in seen if x > 0]
    return max(seen) / min(seen) if seen else 0.0


def _one(above: Any, middle: Any, rows: list[tuple[int, Record]], **style: Any) -> None:
    steps = [step for step, _ in rows]
    above.plot(steps, [_drawable(row["amax"]) for _, row in rows], **style)
    # All zeros are cast with scale 1, which says nothing and would stretch the axis.
    scales = [_drawable(row["scale_max"] if row["amax"] else 0.0) for _, row in rows]
    middle.plot(steps, scales, **style)


def _shares(ax: Any, lines: dict[str, list[tuple[int, Record]]]) -> None:
    """Of the layers: the worst as a line, the median dashed."""
    for name, colour in (("overflow", _OVERFLOW), ("underflow", _UNDERFLOW)):
        at: dict[int, list[float]] = {}
        for rows in lines.values():
            for step, row in rows:
                at.setdefault(step, []).append(100 * (row[name] or 0.0))
        steps = sorted(at)
        worst, middle = [max(at[s]) for s in steps], [statistics.median(at[s]) for s in steps]
        ax.plot(steps, worst, color=colour, marker=".", label=f"{name}, worst layer")
        ax.plot(steps, middle, color=colour, linestyle="--", linewidth=1, label="median layer")
