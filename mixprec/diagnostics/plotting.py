"""The picture of a Report: training losses, and how far each is from fp32's."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Report

# Curves that agree lie on top of each other: the later ones are thinner and dashed, so that all
# can be seen. The colours are told apart by most colour-blind readers (Okabe and Ito, 2008).
STYLES = (
    {"color": "#999999", "linewidth": 5.0, "linestyle": "-"},
    {"color": "#0072B2", "linewidth": 3.0, "linestyle": "-"},
    {"color": "#D55E00", "linewidth": 2.0, "linestyle": "--"},
    {"color": "#000000", "linewidth": 1.2, "linestyle": ":"},
    {"color": "#009E73", "linewidth": 1.2, "linestyle": "-."},
    {"color": "#CC79A7", "linewidth": 1.2, "linestyle": "--"},
    {"color": "#56B4E9", "linewidth": 1.2, "linestyle": "-"},
)


def smooth(losses: list[float], window: int) -> list[float]:
    """The mean of the last `window` finite losses up to each step; NaN before the first."""
    means = []
    for i in range(len(losses)):
        recent = [x for x in losses[max(0, i + 1 - window) : i + 1] if math.isfinite(x)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def draw(report: Report) -> Any:
    """A matplotlib Figure. ImportError that says what to install without matplotlib."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")  # optional, and slow to import
    except ImportError as error:
        raise ImportError(
            f"Report.plot needs matplotlib ({error}): pip install 'mixprec[demo]'"
        ) from error
    rows = [row for row in report.rows if row.losses]
    longest = max((len(row.losses) for row in rows), default=0)
    window = max(1, longest // 25)
    curves = {
        row.recipe: [x * report.loss_factor for x in smooth(row.losses, window)] for row in rows
    }
    base = curves.get("fp32")

    figure = figure_module.Figure(figsize=(9, 6.5), layout="constrained")
    if base is None:
        above, below = figure.subplots(), None
    else:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, row in enumerate(rows):
        curve, style = curves[row.recipe], STYLES[i % len(STYLES)]
        steps = range(1, len(curve) + 1)
        label = row.recipe
        if row.validation_loss is not None:
            label += f" (validation {row.validation_loss * report.loss_factor:.3f})"
        above.plot(steps, curve, label=label, **style)
        if below is not None and base is not None:
            gap = [100 * (x / y - 1) for x, y in zip(curve, base, strict=False)]
            below.plot(range(1, len(gap) + 1), gap, **style)
    above.set_ylabel(f"training {report.loss_name}\n(mean of {window} steps)")
    above.set_title("Training loss by precision")
    above.grid(alpha=0.3)
    if rows:
        above.legend()
    if below is not None:
        below.set_ylabel("difference to fp32 (%)")
        below.grid(alpha=0.3)
    (above if below is None else below).set_xlabel("training step")
    return figure
