"""The picture of train_gpt.py and train_image.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

# Distinguishable with most color vision deficiencies (Okabe and Ito, 2008).
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` finite losses up to each step; NaN before the first."""
    means = []
    for i in range(len(losses)):
        recent = [x for x in losses[max(0, i + 1 - window) : i + 1] if math.isfinite(x)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def plot_losses(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    held_out: Mapping[str, float],
    name: str,
    again: str = "",
) -> None:
    """Training losses by recipe; below, their difference to fp32's, with the losses of held-out
    data at the end as dots. again: fp32 from another seed, grey, with a band of its own difference.
    ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    longest = max(map(len, curves.values()))
    lines = {recipe: smooth(losses, max(1, longest // 25)) for recipe, losses in curves.items()}
    above, below = figure.subplots(2, sharex=True)
    colors = dict(zip((recipe for recipe in curves if recipe != again), cycle(COLORS)))
    for i, (recipe, losses) in enumerate(lines.items()):
        label = f"{recipe} (held out {held_out[recipe]:.3f})" if recipe in held_out else recipe
        style = {"color": colors.get(recipe, "#bbbbbb"), "marker": "o" if longest == 1 else ""}
        above.plot(range(1, len(losses) + 1), losses, label=label, **style)
        if recipe in colors and "fp32" in lines:
            gap = [100 * (x / y - 1) for x, y in zip(losses, lines["fp32"], strict=False)]
            below.plot(range(1, len(gap) + 1), gap, **style)
            if recipe != "fp32" and {recipe, "fp32"} <= held_out.keys():
                at_end = 100 * (held_out[recipe] / held_out["fp32"] - 1)
                below.plot(longest * (1.02 + 0.01 * i), at_end, "o", color=colors[recipe])
    if {again, "fp32"} <= held_out.keys():
        chance = 100 * abs(held_out[again] / held_out["fp32"] - 1)
        label = f"another seed: {chance:.2f} %"
        below.axhspan(-chance, chance, color="#e3e3e3", zorder=0, label=label)
        below.legend(fontsize=9)
    above.set(title="Training loss by precision", ylabel=f"training {name}")
    above.legend()
    below.set(xlabel="training step", ylabel="difference to fp32 (%)")
    for ax in (above, below):
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
