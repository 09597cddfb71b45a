"""Figures that are often repeated about mixed precision, beside measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import accuracy, pages, results
from .table import markdown

TASKS = ("gpt", "cnn", "vit")
HEADER = ("often said", "measured here", "how")


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _case(bench: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in bench["rows"] if row["name"] == name)


def _ratios(training: dict[str, Any]) -> str:
    """tokens/s of each recipe against FP32's."""
    speed = {row["recipe"]: row["tokens_per_second"] for row in training["rows"]}
    if not speed.get("fp32"):
        return ""
    known = {name: value for name, value in speed.items() if value and name != "fp32"}
    return ", ".join(f"{name} {value / speed['fp32']:.2f}x" for name, value in known.items())


def _held(sizes: dict[str, int]) -> int:
    return sizes["parameters"] + sizes["gradients"] + sizes["optimizer"]


def _resident(footprint: dict[str, Any]) -> str:
    of = {name: _held(sizes) for name, sizes in footprint["training"].items()}
    return (
        "no: parameters, gradients and optimizer state take "
        f"{of['bf16'] / of['fp32']:.2f}x of FP32's bytes in bf16 and {of['fp8'] / of['fp32']:.2f}x "
        "in fp8, because FP32 masters and moments stay"
    )


def _saved(footprint: dict[str, Any], low: str, base: str) -> str:
    saved = {name: sizes["saved"] for name, sizes in footprint["training"].items()}
    return f"kept for backward by linear layers: {low} {saved[low] / saved[base]:.2f}x of {base}"


def _losses(folder: Path, recipes: tuple[str, ...]) -> str:
    found = []
    for task in TASKS:
        content = accuracy.load(folder, task)
        lines = [line for line in content["summary"] if line["recipe"] in recipes]
        worst = max(lines, key=lambda line: accuracy.worse(content, line))
        gap, unit = accuracy.worse(content, worst), content["unit"]
        found.append(
            f"{task} {abs(gap):.2f}{'' if unit == '%' else ' '}{unit} "
            f"{'worse' if gap > 0 else 'better'} than FP32 ({worst['recipe']}, "
            f"{accuracy.verdict(content, worst)})"
        )
    return "the worst of them: " + "; ".join(found)


def _flushed(folder: Path, name: str) -> str:
    """What became of a run of the loss scaling demonstration."""
    runs = {run["name"]: run for run in _json(folder / "underflow.json")["runs"]}
    last = {key: run["losses"][-1] for key, run in runs.items()}
    share = runs[name]["flushed"][-1]
    return (
        f"{name}: last loss {last[name] / last['fp32']:.2f}x of FP32's, {share:.1%} of the "
        "gradients flushed to 0"
    )


def block(folder: Path) -> str:
    """The table; folder: the results of the CPU."""
    demo, bench = _json(folder / "demo.json"), results.load(folder / "bench.json")
    footprint = _json(folder / "footprint.json")
    mlp = _case(bench, "mlp/fp8/bf16")["figure"]
    frozen = footprint["frozen"]
    smaller = ", ".join(
        f"{fmt} {one['before'] / one['after']:.2f}x smaller than FP32, SQNR of the weights "
        f"{one['worst_sqnr']:.0f} dB"
        for fmt, one in frozen.items()
    )
    step = ", ".join(
        f"{name.split('/', 1)[1]} {_case(bench, name)['figure']:.2f}x"
        for name in ("step/fp32/gpt", "step/bf16/gpt", "step/fp32/many")
    )
    runs, held = "`python examples/accuracy.py`", "`python -m mixprec.bench footprint`"
    scaling = "`python -m mixprec.bench underflow`"
    body = [
        ("mixed precision trains 2x faster",
         f"this CPU, tokens/s against FP32: {_ratios(demo)}", "`make demo`"),
        ("mixed precision halves the memory", _resident(footprint), held),
        ("", _saved(footprint, "bf16", "fp32"), held),
        ("FP8 halves activation memory", _saved(footprint, "fp8", "bf16"), held),
        ("FP8 is twice as fast as BF16", f"MLP on this CPU: {mlp:.2f}x the time",
         "`make bench`"),
        ("16 bits cost no accuracy", _losses(folder, ("bf16", "fp16")), runs),
        ("FP8 costs 0.5 to 2 % of accuracy",
         _losses(folder, ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block")), runs),
        ("fp16 needs loss scaling", f"where gradients are small, yes; {_flushed(folder, 'fp16')}; "
         f"{_flushed(folder, 'fp16, GradScaler')}", scaling),
        ("bf16 needs no loss scaling", _flushed(folder, "bf16"), scaling),
        ("weights in 8 bits are 4x smaller", smaller, held),
        ("a fused optimizer step is faster than torch's fused one", f"with loss scaling and "
         f"clipping, on this CPU: {step}", "`make bench`"),
    ]  # fmt: skip
    return f"{markdown(HEADER, body)}\n\n{pages.machine(footprint['environment'])}"
