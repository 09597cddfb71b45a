"""Figures of the diagnostics: the losses of a Report, the records of a Monitor, memory.

`plot_report`, `plot_records` and `plot_memory` return a matplotlib Figure; `save` writes one to a
file.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._atomic import replace_file

if TYPE_CHECKING:
    from .memory_report import MemoryReport
    from .report import Report
    from .stats.records import Record

# Distinguishable with most color vision deficiencies (Okabe and Ito, 2008).
BLUE, GREEN, RED = "#0072B2", "#009E73", "#D55E00"
# Equal curves overlap: later ones are thinner and dashed, so that all are visible.
CURVES = (
    {"color": "#999999", "linewidth": 5.0, "linestyle": "-"},
    {"color": BLUE, "linewidth": 3.0, "linestyle": "-"},
    {"color": RED, "linewidth": 2.0, "linestyle": "--"},
    {"color": "#000000", "linewidth": 1.2, "linestyle": ":"},
    {"color": GREEN, "linewidth": 1.2, "linestyle": "-."},
    {"color": "#CC79A7", "linewidth": 1.2, "linestyle": "--"},
    {"color": "#56B4E9", "linewidth": 1.2, "linestyle": "-"},
)
LAYERS = (RED, BLUE, GREEN)  # of the named layers in plot_records
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


def smooth(losses: list[float], window: int) -> list[float]:
    """The mean of the last `window` finite losses up to each step; NaN before the first."""
    means = []
    for i in range(len(losses)):
        recent = [x for x in losses[max(0, i + 1 - window) : i + 1] if math.isfinite(x)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def plot_report(report: Report) -> Any:
    """Training losses, and their difference to fp32's. ImportError without matplotlib."""
    figure = _figure(9, 6.5, "Report.plot")
    rows = [row for row in report.rows if row.losses]
    longest = max((len(row.losses) for row in rows), default=0)
    window = max(1, longest // 25)
    curves = {
        row.recipe: [x * report.loss_factor for x in smooth(row.losses, window)] for row in rows
    }
    base = curves.get("fp32")
    heights = (1,) if base is None else (2, 1)
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    above, below = axes[0], axes[-1]
    for i, row in enumerate(rows):
        curve, style = curves[row.recipe], CURVES[i % len(CURVES)]
        if longest == 1:  # a line of one point is not seen
            style = {**style, "marker": "o"}
        label = row.recipe
        if row.validation_loss is not None:
            label += f" (validation {row.validation_loss * report.loss_factor:.3f})"
        above.plot(range(1, len(curve) + 1), curve, label=label, **style)
        if base is not None:
            gap = [100 * (x / y - 1) for x, y in zip(curve, base, strict=False)]
            below.plot(range(1, len(gap) + 1), gap, **style)
    means = f"\n(mean of {window} steps)" if window > 1 else ""
    above.set_ylabel(f"training {report.loss_name}{means}")
    above.set_title("Training loss by precision")
    if rows:
        above.legend()
    if base is not None:
        below.set_ylabel("difference to fp32 (%)")
    for ax in axes:
        ax.grid(alpha=0.3)
    below.set_xlabel("training step")
    below.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure


def plot_records(records: Sequence[Record]) -> Any:
    """amax, scale and lost shares over the steps: a column for each of x, w and g, a line for each
    layer. The three with the widest range of amax have a color and a name. ImportError without
    matplotlib."""
    figure = _figure(12, 8.5, "Monitor.plot")
    axes = figure.subplots(3, 3, sharex=True, sharey="row", height_ratios=(3, 2, 2))
    figure.suptitle("What was cast: largest magnitude, scale, and what was lost")
    for column, (role, title) in enumerate(TENSORS.items()):
        above, middle, below = (axes[i][column] for i in range(3))
        above.set_title(title)
        lines = _by_layer(records, role)
        named = sorted(lines, key=lambda layer: _range(lines[layer]), reverse=True)[: len(LAYERS)]
        for layer, samples in lines.items():
            if layer not in named:
                _plot_layer(above, middle, samples, color="#bbbbbb", linewidth=0.8, zorder=1)
        for layer, color in zip(named, LAYERS, strict=False):
            short = layer if len(layer) <= 30 else "..." + layer[-27:]
            style = {"color": color, "linewidth": 1.8, "marker": ".", "zorder": 2}
            _plot_layer(above, middle, lines[layer], label=short or "(the model)", **style)
        if named:
            others = len(lines) - len(named)
            above.legend(title=f"and {others} others in grey" if others else None, fontsize=8)
        _plot_shares(below, lines)
        if role == "w":  # which hardly ever loses values, so there is space
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


def plot_memory(reports: Sequence[MemoryReport], names: Sequence[str]) -> Any:
    """A bar for each report, stacked by the rows `names`, without those too thin to be seen. What
    is saved for backward is hatched. ImportError without matplotlib."""
    figure = _figure(3.5 + 1.5 * len(reports), 5, "MemoryReport.plot")
    ax = figure.subplots()
    shades = importlib.import_module("matplotlib").colormaps["tab20"]
    rows, visible = [report.rows() for report in reports], max(r.total for r in reports) / 500
    seen = [name for name in names if max(row.get(name, 0) for row in rows) >= visible]
    bottom = [0.0] * len(reports)
    for i, name in enumerate(seen):
        heights = [row.get(name, 0) / 1e6 for row in rows]
        shade = shades(i % 20)
        hatch = "//" if name.startswith("saved") else None
        ax.bar(
            range(len(reports)), heights, 0.6, bottom, label=name, color=shade, hatch=hatch,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set_xticks(range(len(reports)), [report.label for report in reports])
    ax.set_ylabel("MB (10^6 bytes)")
    ax.set_title("What a training step keeps")
    ax.grid(axis="y", alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    return figure


def _by_layer(records: Sequence[Record], role: str) -> dict[str, list[tuple[int, Record]]]:
    """The (step, sample) pairs of each layer."""
    lines: dict[str, list[tuple[int, Record]]] = {}
    for record in records:
        for sample in record["tensors"]:
            if sample["tensor"] == role:
                lines.setdefault(sample["layer"], []).append((record["step"], sample))
    return lines


def _positive(x: float) -> float:
    """NaN, a gap in the line, for values that a logarithmic axis cannot show."""
    return x if math.isfinite(x) and x > 0 else math.nan


def _range(samples: list[tuple[int, Record]]) -> float:
    """The ratio of the largest and the smallest amax; Inf where one is not finite."""
    seen = [sample["amax"] for _, sample in samples]
    if not all(map(math.isfinite, seen)):
        return math.inf
    seen = [x for x in seen if x > 0]
    return max(seen) / min(seen) if seen else 0.0


def _plot_layer(above: Any, middle: Any, samples: list[tuple[int, Record]], **style: Any) -> None:
    steps = [step for step, _ in samples]
    above.plot(steps, [_positive(sample["amax"]) for _, sample in samples], **style)
    # A tensor of zeros is cast with scale 1, which would only stretch the axis.
    scales = [_positive(sample["scale_max"] if sample["amax"] else 0.0) for _, sample in samples]
    middle.plot(steps, scales, **style)


def _plot_shares(ax: Any, lines: dict[str, list[tuple[int, Record]]]) -> None:
    """Over all layers: the worst as a line, the median dashed."""
    for name, color in (("overflow", RED), ("underflow", BLUE)):
        at: dict[int, list[float]] = {}
        for samples in lines.values():
            for step, sample in samples:
                at.setdefault(step, []).append(100 * (sample[name] or 0.0))
        steps = sorted(at)
        worst, middle = [max(at[s]) for s in steps], [statistics.median(at[s]) for s in steps]
        ax.plot(steps, worst, color=color, marker=".", label=f"{name}, worst layer")
        ax.plot(steps, middle, color=color, linestyle="--", linewidth=1, label="median layer")
