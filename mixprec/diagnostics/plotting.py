"""Figures of the diagnostics: records of a Monitor, a plan, memory.

The functions return a matplotlib Figure; `save` writes one to a file.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from .._checkpoint_file import replace_file
from .writers import Record, layer_name

# Distinguishable with most color vision deficiencies (Okabe and Ito, 2008).
BLUE, GREEN, RED = "#0072B2", "#009E73", "#D55E00"
COLORS = ("#000000", BLUE, RED, GREEN, "#CC79A7", "#56B4E9", "#E69F00")
LAYERS = (RED, BLUE, GREEN)  # of the named layers in plot_records
Lines = dict[str, list[tuple[int, Record]]]  # (step, sample) pairs by layer
TENSORS = {"x": "activations x", "w": "weights w", "g": "gradients g"}


def _figure(width: float, height: float, caller: str) -> Any:
    try:
        module = importlib.import_module("matplotlib.figure")  # optional, and slow to import
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib ({error}): pip install 'mixprec[demo]'"
        ) from error
    return module.Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write the whole file or, with an OSError, nothing; its format follows the suffix of `path`
    (.png, .svg, .pdf)."""
    suffix = Path(path).suffix.removeprefix(".") or "png"
    replace_file(path, lambda temporary: figure.savefig(temporary, format=suffix, dpi=130))


def plot_plan(
    front: Sequence[tuple[float, float]], points: Mapping[str, tuple[float, float]], unit: str
) -> Any:
    """The smallest loss for each time, as parts of bf16's time, with what uniform recipes and the
    plan have. ImportError without matplotlib."""
    figure = _figure(7, 5, "Plan.plot")
    ax = figure.subplots()
    ax.plot(*zip(*front, strict=True), color=BLUE, marker=".", label="the best for each time")
    for (name, (time, loss)), color in zip(points.items(), cycle(COLORS[2:])):
        ax.plot([time], [loss], "o", color="#000000" if name == "plan" else color, label=name)
    ax.set_yscale("log")
    ax.set_xlabel(f"time, as a part of bf16's{unit}")
    ax.set_ylabel("growth of the loss, predicted")
    ax.set_title("What a plan can have")
    ax.grid(alpha=0.3)
    ax.legend()
    return figure


def plot_records(records: Sequence[Record]) -> Any:
    """amax, scale and lost shares over the steps: a column for each of x, w and g, a line for each
    layer. The three that lose most have a color and a name. ImportError without matplotlib."""
    figure = _figure(11, 8.6, "Monitor.plot")
    axes = figure.subplots(len(QUANTITIES), 3, sharex=True, height_ratios=(3, 2.4, 1.2, 2))
    figure.suptitle("What was cast: largest magnitude, scale, and what was lost")
    columns = {role: _by_layer(records, role) for role in TENSORS}
    layers = list(dict.fromkeys(layer for lines in columns.values() for layer in lines))
    worst = sorted(layers, key=lambda layer: _loss(columns, layer), reverse=True)[: len(LAYERS)]
    colors = dict(zip(worst, LAYERS, strict=False))
    for column, (role, title) in enumerate(TENSORS.items()):
        axes[0][column].set_title(title, fontsize=11)
        axes[-1][column].set_xlabel("training step")
        for layer, samples in columns[role].items():
            style = {"color": "#bbbbbb", "linewidth": 0.8, "zorder": 1}
            if layer in colors:
                style = {"color": colors[layer], "linewidth": 1.6, "marker": ".", "zorder": 2}
            steps = [step for step, _ in samples]
            for ax, (value, _) in zip(axes[:, column], QUANTITIES, strict=True):
                ax.plot(steps, [value(sample) for _, sample in samples], **style)
    for row, (_, name) in enumerate(QUANTITIES):
        axes[row][0].set_ylabel(name)
        for ax in axes[row]:
            ax.grid(alpha=0.3)
            if row < 2:
                _whole_powers(ax)
        if row >= 2:  # shares of the three tensors are comparable, their magnitudes are not
            top = max(1.0, *(ax.get_ylim()[1] for ax in axes[row]))
            for ax in axes[row]:
                ax.set_ylim(-0.05 * top, top)
    line = importlib.import_module("matplotlib.lines").Line2D
    names = [layer_name(layer, 40) for layer in worst]
    handles = [line([], [], color=color, marker=".") for color in LAYERS[: len(worst)]]
    if len(layers) > len(worst):
        names.append(f"the {len(layers) - len(worst)} other layers")
        handles.append(line([], [], color="#bbbbbb", linewidth=0.8))
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def plot_memory(bars: Sequence[tuple[str, Mapping[str, int]]], names: Sequence[str]) -> Any:
    """A bar for each label, stacked by the rows `names`, without those too thin to be seen. What is
    saved for backward is hatched. ImportError without matplotlib."""
    figure = _figure(3.5 + 1.5 * len(bars), 5, "MemoryReport.plot")
    ax = figure.subplots()
    shades = importlib.import_module("matplotlib").colormaps["tab20"]
    visible = max(sum(rows.values()) for _, rows in bars) / 500
    seen = [name for name in names if max(rows.get(name, 0) for _, rows in bars) >= visible]
    bottom = [0.0] * len(bars)
    for i, name in enumerate(seen):
        heights = [rows.get(name, 0) / 1e6 for _, rows in bars]
        hatch = "//" if name.startswith("saved") else None
        ax.bar(
            range(len(bars)), heights, 0.6, bottom, label=name, color=shades(i % 20), hatch=hatch,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set_xticks(range(len(bars)), [label for label, _ in bars])
    ax.set_ylabel("MB (10^6 bytes)")
    ax.set_title("What a training step keeps")
    ax.grid(axis="y", alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    return figure


def _by_layer(records: Sequence[Record], role: str) -> Lines:
    lines: Lines = {}
    for record in records:
        for sample in record["tensors"]:
            if sample["tensor"] == role:
                lines.setdefault(sample["layer"], []).append((record["step"], sample))
    return lines


def _positive(x: float) -> float:
    """NaN, a gap in the line, for values that a logarithmic axis cannot show."""
    return x if math.isfinite(x) and x > 0 else math.nan


def _loss(columns: Mapping[str, Lines], layer: str) -> tuple[float, float]:
    """The largest share of a tensor that a layer lost, Inf where one was not finite; then the ratio
    of the largest and the smallest amax."""
    lost = widest = 0.0
    for lines in columns.values():
        samples = [sample for _, sample in lines.get(layer, ())]
        for s in samples:
            share = (s["overflow"] or 0.0) + (s["underflow"] or 0.0)
            lost = max(lost, share if math.isfinite(s["amax"]) else math.inf)
        seen = [_positive(s["amax"]) for s in samples]
        seen = [x for x in seen if not math.isnan(x)]
        widest = max(widest, max(seen) / min(seen) if seen else 0.0)
    return lost, widest


def _whole_powers(ax: Any) -> None:
    """A logarithmic axis from one power of two to another, two spacing at least."""
    low, high = ax.dataLim.intervaly
    if not 0 < low <= high < math.inf:  # nothing is drawn
        low = high = 1.0
    bottom, top = math.floor(math.log2(low)), math.ceil(math.log2(high))
    missing = max(0, 2 - (top - bottom))
    ax.set_yscale("log", base=2)
    ax.set_ylim(2.0 ** (bottom - missing / 2 - 0.2), 2.0 ** (top + missing / 2 + 0.2))
    spacing = math.ceil((top - bottom + 1) / 8)
    ax.set_yticks([2.0**i for i in range(bottom, top + 1, spacing)])
    ax.minorticks_off()


# A row each: its value of a sample, and its name.
QUANTITIES: tuple[tuple[Callable[[Record], float], str], ...] = (
    (lambda sample: _positive(sample["amax"]), "amax"),
    # A tensor of zeros is cast with scale 1, which would only stretch the axis.
    (lambda s: _positive(s["scale_max"] if s["amax"] else 0.0), "scale (largest)"),
    (lambda sample: 100 * (sample["overflow"] or 0.0), "overflow (%)"),
    (lambda sample: 100 * (sample["underflow"] or 0.0), "underflow (%)"),
)
