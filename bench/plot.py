"""The pictures of pages of docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mixprec._checkpoint_file import replace_file

from .results import ResultError

# With their markers, and colors that most color vision deficiencies tell apart.
PRODUCTS = {
    "y": ("o", "#0072B2"),
    "grad_input": ("s", "#D55E00"),
    "grad_weight": ("^", "#009E73"),
}


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
    """A row a recipe: the difference of its final loss to FP32, and the SQNRs of its products."""
    lines = [line for line in content["summary"] if line["recipe"] != "fp32"]
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for run in content["runs"]:
        runs.setdefault(run["recipe"], {})[run["seed"]] = run
    base = {seed: run["value"] for seed, run in runs["fp32"].items()}
    figure = _figure(9, 5.2)
    left, right = figure.subplots(1, 2, sharey=True)
    apart = 100 * (max(base.values()) / min(base.values()) - 1)
    left.axvspan(-apart, apart, color="#e3e3e3", label="two FP32 seeds differ by up to this")
    left.axvline(0.0, color="#333333", linewidth=0.8)
    for row, line in enumerate(lines):

        def label(text: str, row: int = row) -> dict[str, str]:  # once in the legend
            return {"label": text} if row == 0 else {}

        by_seed = runs[line["recipe"]]
        gaps = [100 * (run["value"] / base[seed] - 1) for seed, run in by_seed.items()]
        each = label("one seed, against FP32 with this seed")
        left.plot(gaps, [row] * len(gaps), "|", color="#D55E00", ms=11, mew=1.8, **each)
        mean, half = line["difference"], line["difference_interval"]
        both = label(f"mean of {len(base)} seeds, with its 95 % interval")
        left.errorbar(mean, row, xerr=half, fmt="o", color="#333333", markersize=5, **both)
        for offset, (product, (marker, color)) in enumerate(PRODUCTS.items()):
            found = [
                layer[product]
                for run in by_seed.values()
                for layer in run["sqnr"].values()
                if layer.get(product) is not None
            ]
            place, middle = row + 0.24 * (offset - 1), median(found)
            right.plot([min(found), max(found)], [place, place], color=color, linewidth=1.4)
            right.plot(middle, place, marker, color=color, ms=5, linestyle="", **label(product))
    left.set_yticks(range(len(lines)), [line["recipe"] for line in lines])
    left.set_ylim(len(lines) - 0.5, -0.5)
    left.set(xlabel=f"{content['metric']} more than FP32 (%)")
    left.set_title("Loss on held-out text after training (right is worse)", fontsize=10)
    right.set(xlabel="signal to quantization noise ratio (dB)")
    right.set_title("Precision of the products (right is better)", fontsize=10)
    for axes, columns in ((left, 1), (right, 3)):
        for row in range(0, len(lines), 2):  # so that the eye stays in its row
            axes.axhspan(row - 0.5, row + 0.5, color="#000000", alpha=0.03, linewidth=0)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="y", length=0)
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.08)}
        axes.legend(fontsize=8, frameon=False, ncols=columns, **above)
    _save(figure, path)
