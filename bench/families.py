"""How much of models convert reaches and what training loses, as examples/model_table.py found."""

from __future__ import annotations

import statistics
from typing import Any

from . import pages
from .table import markdown

_HEADER = (
    "model",
    "converted",
    "activations",
    "left",
    "fp32",
    "autocast",
    "bf16",
    "fp8",
    "fp16",
)
_WAYS = ("torch.autocast", "bf16", "fp8", "fp16")
_MOST, _NEAR, _REFERENCE = 0.95, 0.02, 0.01


def share(row: dict[str, Any]) -> float:
    """Of the FLOPs of products with weights, those that run by the recipe."""
    converted, left = (row["flops"].get(name, 0) for name in ("converted", "left"))
    return float(converted / (converted + left))


def loss(row: dict[str, Any], way: str) -> float:
    """The median over seeds of how far the loss is from that of FP32, relative to it."""
    pairs = zip(row["losses"][way], row["losses"]["fp32"], strict=True)
    return statistics.median(abs(own - fp32) / abs(fp32) for own, fp32 in pairs)


def block(content: dict[str, Any]) -> str:
    rows = content["rows"]
    body = [_line(row) for row in sorted(rows, key=lambda row: (-share(row), row["name"]))]
    reached = sum(share(row) >= _MOST for row in rows)
    judged = [row for row in rows if loss(row, "torch.autocast") <= _REFERENCE]
    near = sum(loss(row, "fp8") <= _NEAR for row in judged)
    summary = (
        f"At least {_MOST:.0%} of the FLOPs are converted in {reached} of {len(rows)} models. "
        f"Where torch.autocast is within {_REFERENCE:.0%} of FP32's loss, in {len(judged)} models, "
        f"fp8 is within {_NEAR:.0%} in {near}."
    )
    table = markdown(_HEADER, body)
    return f"{summary} {pages.machine(content['environment'])}\n\n{table}"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    flops = row["flops"]
    products = flops.get("converted", 0) + flops.get("left", 0)
    left = ", ".join(f"{name} {count / products:.1%}" for name, count in row["left"].items())
    attention = flops.get("attention", 0) / (products + flops.get("attention", 0))
    losses = (f"{loss(row, way):.2%}" for way in _WAYS)
    fp32 = statistics.median(row["losses"]["fp32"])
    return row["name"], f"{share(row):.1%}", f"{attention:.0%}", left or "-", f"{fp32:.3f}", *losses
