"""What README.md shows first: two numbers, a picture, and what each processor gains."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from . import results, table
from .cases.registry import baselines, quantity
from .studies import peak

# The processor of the figures, by name: the fastest of those measured, whoever ran last.
SHOWN = "AMD EPYC (family 26, model 2)"
MODELS = {"own_gpt": "nanoGPT", "gpt2": "GPT-2", "llama": "Llama", "bert": "BERT", "vit": "ViT"}
FORMATS = ("bf16", "fp8")
# Ways of docs/memory.md, and what the picture calls them.
WAYS = {
    "FP32": "FP32",
    "`torch.autocast`, bf16": "torch.autocast",
    "checkpointing": "checkpointing",
    "lean balanced": "mixprec.lean",
    "checkpointing, lean balanced": "lean, checkpointing",
}
PICTURES = {"light": "docs/front-light.svg", "dark": "docs/front-dark.svg"}


def _speedup(rows: list[dict[str, Any]], case: str, recipe: str) -> float | None:
    """How many times as fast as torch's fastest way the fastest way of a recipe is, over the ways
    of one model: eager and compiled, fused or not."""
    found = [r for r in rows if r["name"].startswith(f"{case}/") and r["status"] == "ok"]
    ours = [
        r["median"]["ours"]
        for r in found
        if r["name"].split("/")[-1].split("-")[0] == recipe and "block" not in r["name"]
    ]
    torchs = [seconds for r in found for seconds in baselines(r["median"]).values()]
    return min(torchs) / min(ours) if ours and torchs else None


def figures(root: Path) -> dict[str, Any]:
    """The numbers of the picture: speedups by model and recipe, peaks in MB by way, and where."""
    shown = [c for c in results.load_all_processors(root) if c["environment"]["processor"] == SHOWN]
    if len(shown) != 1:
        raise results.ResultError(f"bench/results/cpu must have one file of {SHOWN}")
    (bench,), memory = shown, results.read_json(root / results.CPU / "peak-phi3.json")
    steps = {
        title: {recipe: _speedup(bench["rows"], f"training/{name}", recipe) for recipe in FORMATS}
        for name, title in MODELS.items()
    }
    peaks = {way: peak.measured(memory)[name]["peak"] / 1e6 for name, way in WAYS.items()}
    return {
        **{"processor": SHOWN, "steps": steps, "peaks": peaks, "model": memory["what"]},
        "memory on": memory["environment"]["processor"],
    }


def headline(root: Path) -> str:
    """Two numbers, for the first screen."""
    found = figures(root)
    speed = [one["bf16"] for one in found["steps"].values()]
    names, peaks = list(found["steps"]), found["peaks"]
    fp32, autocast, checkpointing, lean, both = (f"{mb:,.0f}" for mb in peaks.values())
    return (
        f"BF16 training steps of {', '.join(names[:-1])} and {names[-1]} run **{min(speed):.2f} to "
        f"{max(speed):.2f} times as fast** as PyTorch's, each in its fastest way (eager or "
        f"compiled, PyTorch in FP32 or autocast), on {SHOWN} ([how measured](docs/benchmarks.md)). "
        f"A process that trains Phi-3 on {found['memory on']} takes {fp32} MB in FP32, {autocast} "
        f"under `torch.autocast` and {checkpointing} with checkpointing; with `mixprec.lean` "
        f"{lean}, with both **{both} MB** ([memory](docs/memory.md))."
    )


def processors(root: Path) -> str:
    """A line per processor, for a step of the GPT of examples/; a sentence per GPU that trained."""
    body = []
    for content in results.load_all_processors(root):
        where = content["environment"]
        rows = [row for row in content["rows"] if row["status"] == "ok"]
        fused = "torch unscale, clip, fused"
        steps = [r["median"][fused] / r["median"]["ours"] for r in rows if fused in r["median"]]
        found = [_speedup(rows, "training/gpt/4x512", recipe) for recipe in FORMATS]
        cells = [quantity(one, "x") if one else "" for one in found]
        cells.append(quantity(statistics.median(steps), "x") if steps else "")
        body.append((f"{where['processor']}, {where['isa']}", *cells))
    trained = []
    for path in sorted((root / results.RESULTS).glob("*/train/results.json")):
        content = results.read_json(path)
        speed = {row["recipe"]: float(row["tokens_per_second"]) for row in content["rows"]}
        size, where = content["options"]["parameters"] / 1e6, content["environment"]
        each = [f"{speed[recipe]:,.0f} tokens/s in {recipe}" for recipe in FORMATS]
        trained.append(
            f"On {where['gpu_name']}, a GPT of {size:,.0f}M parameters, commit {where['commit']}: "
            f"{', '.join(each)}."
        )
    shown = table.markdown(("", "bf16", "fp8", "AdamW's step"), body)
    return "\n\n".join([shown, *trained])


def draw(root: Path) -> list[Path]:
    """Write the picture for light and for dark pages; needs matplotlib. The numbers stand in the
    files, as their description."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    found = figures(root)
    written = []
    for theme, name in PICTURES.items():
        ink, grid = ("#1f2328", "#d0d7de") if theme == "light" else ("#e6edf3", "#30363d")
        style = {"svg.hashsalt": "mixprec", "font.size": 10, "text.color": ink}
        style |= {f"{axis}.color": ink for axis in ("xtick", "ytick")} | {"axes.labelcolor": ink}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
            for i, (recipe, color) in enumerate(zip(FORMATS, ("#1a7f64", "#7c5cd6"), strict=True)):
                speeds = [one[recipe] for one in found["steps"].values()]
                at = [place + 0.4 * i for place in range(len(speeds))]
                bars = left.bar(at, speeds, width=0.38, color=color, label=recipe)
                left.bar_label(bars, fmt="%.2f", fontsize=8, color=ink)
            left.axhline(1, color=ink, linewidth=1, linestyle="--")
            left.set_xticks([place + 0.2 for place in range(len(found["steps"]))], found["steps"])
            left.set_ylim(0, 1.7)
            left.set_title("training step: times as fast as PyTorch's fastest way", fontsize=10)
            left.legend(frameon=False, ncols=2, loc="upper left")
            ways = list(found["peaks"])[::-1]
            colors = ["#1a7f64" if "lean" in way else "#8b949e" for way in ways]
            bars = right.barh(ways, [found["peaks"][way] for way in ways], color=colors)
            right.bar_label(bars, fmt="{:,.0f}", fontsize=8, color=ink, padding=2)
            right.set_xlim(0, 1.15 * max(found["peaks"].values()))
            right.set_title("training Phi-3: peak memory of the process, MB", fontsize=10)
            for axes in (left, right):
                axes.spines[["top", "right"]].set_visible(False)
                axes.spines[["left", "bottom"]].set_color(grid)
                axes.patch.set_alpha(0)
            about = {"Date": None, "Description": json.dumps(found)}
            figure.savefig(root / name, transparent=True, metadata=about)
            plt.close(figure)
        written.append(root / name)
    return written
