"""The pictures of pages of docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mixprec._atomic import replace_file

from .results import ResultError

PRODUCTS = {"y": "o", "grad_input": "s", "grad_weight": "^"}  # with their markers


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ResultError("plot: matplotlib is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def accumulator(
    errors: dict[str, dict[str, list[float]]], sizes: Sequence[int], path: Path
) -> None:
    """Relative errors over K, with promotion and without, for each kind of data."""
    figure = _figure(7, 4.2)
    axes = figure.subplots()
    for data, color in zip(errors, ("tab:blue", "tab:red"), strict=True):
        for way, style in (("without", "--"), ("with", "-")):
            label = f"{data}, {way} promotion"
            axes.loglog(sizes, errors[data][way], style, color=color, marker="o", label=label)
    axes.axhline(2.0**-8, color="gray", linewidth=0.8)
    axes.annotate("half a unit of bf16", (sizes[0], 2.0**-8), va="bottom", fontsize=8)
    axes.set(xlabel="K", ylabel="relative error of the result (Frobenius)")
    axes.set_title("FP8 products summed as Hopper's tensor cores do (simulated)", fontsize=10)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    _save(figure, path)


def underflow(runs: list[dict[str, Any]], path: Path) -> None:
    """Losses above, shares of flushed gradients below."""
    # Curves that agree hide each other: the later are thinner.
    colors, widths = ("#999999", "#0072B2", "#D55E00", "#000000"), (5.0, 2.5, 2.0, 1.6)
    looks = zip(colors, ("-", "--", "-", ":"), widths, strict=True)
    figure = _figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run, (color, line, width) in zip(runs, looks, strict=True):
        style = {"color": color, "linestyle": line, "linewidth": width}
        steps = range(1, len(run["losses"]) + 1)
        above.semilogy(steps, run["losses"], label=run["name"], **style)
        if run["name"] != "fp32":  # with itself it agrees
            below.plot(steps, [100 * share for share in run["flushed"]], **style)
    above.set(ylabel="training loss", title="fp16 stalls where its gradients become 0")
    below.set(xlabel="training step", ylabel="gradients flushed to 0 (%)", ylim=(-4, 104))
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    _save(figure, path)


def formats(content: dict[str, Any], path: Path) -> None:
    """Training losses less those of FP32 on the left, SQNRs over the layers on the right."""
    by_recipe: dict[str, dict[int, dict[str, Any]]] = {}
    for run in content["runs"]:
        by_recipe.setdefault(run["recipe"], {})[run["seed"]] = run
    base = by_recipe.pop("fp32")
    figure = _figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    points = len(next(iter(base.values()))["curve"])
    parts = [100 * (i + 1) / points for i in range(points)]
    if len(base) > 1:  # what another seed changes
        mean = [fmean(run["curve"][i] for run in base.values()) for i in range(points)]
        far = [max(abs(r["curve"][i] - m) for r in base.values()) for i, m in enumerate(mean)]
        left.fill_between(
            parts, [-x for x in far], far, color="#dddddd", label="fp32, another seed"
        )
    for row, (recipe, runs) in enumerate(by_recipe.items()):
        color = f"C{row}"
        gaps = [
            fmean(run["curve"][i] - base[seed]["curve"][i] for seed, run in runs.items())
            for i in range(points)
        ]
        left.plot(parts, gaps, color=color, label=recipe)
        for offset, (product, marker) in enumerate(PRODUCTS.items()):
            found = [
                layer[product]
                for run in runs.values()
                for layer in run["sqnr"].values()
                if layer.get(product) is not None
            ]
            place = row + 0.22 * (offset - 1)
            right.plot([min(found), max(found)], [place, place], color=color, linewidth=1)
            label = product if row == 0 else None
            right.plot(
                median(found), place, marker, color=color, markersize=5, linestyle="", label=label
            )
    left.axhline(0.0, color="#333333", linewidth=0.8)
    left.set(xlabel="% of the training run", ylabel=f"{content['metric']} more than fp32")
    left.set_title("Training loss, mean over the seeds", fontsize=10)
    left.legend(fontsize=7)
    right.set_yticks(range(len(by_recipe)), list(by_recipe))
    right.invert_yaxis()
    right.set(xlabel="dB")
    right.set_title("SQNR of the products: median and range over the layers", fontsize=10)
    right.legend(fontsize=7)
    right.grid(axis="x", alpha=0.3)
    _save(figure, path)
