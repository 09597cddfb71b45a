"""How many bytes a training step holds in each precision: bench/results/cpu/footprint.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mixprec import compare, freeze

from . import pages, results
from .environment import environment
from .table import markdown

RECIPES = ("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block")
LAYERS, WIDTH, TOKENS = 4, 1024, 16384


class Stack(nn.Module):
    """Linear layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean(dtype=torch.float32)  # a loss that saves nothing itself


def measure() -> dict[str, Any]:
    """One training step of the stack in each recipe, and the stack frozen for inference."""
    where = environment(quick=False)
    torch.manual_seed(0)
    report = compare(Stack, [torch.randn(TOKENS, WIDTH)], RECIPES)
    training = {
        row.recipe: {
            "parameters": row.parameter_bytes,
            "gradients": row.gradient_bytes,
            "optimizer": row.optimizer_bytes,
            "saved": row.saved_bytes,
        }
        for row in report.rows
    }
    frozen = {}
    for fmt in ("int8", "fp8"):
        _, sizes = freeze(Stack(), fmt)
        frozen[fmt] = {
            "before": sizes.bytes_before,
            "after": sizes.bytes_after,
            "worst_sqnr": min(layer.sqnr for layer in sizes.layers),
        }
    return {
        "environment": where,
        "what": f"{LAYERS} nn.Linear of {WIDTH} x {WIDTH}, {TOKENS} tokens, AdamW",
        "training": training,
        "frozen": frozen,
    }


def write(root: Path) -> str:
    """Measure, write the result; return the table."""
    content = measure()
    results.write_json(root / results.CPU / "footprint.json", content)
    return block(content)


def block(content: dict[str, Any]) -> str:
    """The table for docs/: what a step holds, and what freezing saves."""
    training = content["training"]
    header = ("recipe", *training["fp32"])
    body = [
        (recipe, *(f"{size / 1e6:.1f} MB" for size in sizes.values()))
        for recipe, sizes in training.items()
    ]
    frozen = "; ".join(
        f"{fmt} {one['before'] / one['after']:.2f}x smaller than FP32, SQNR "
        f"{one['worst_sqnr']:.0f} dB"
        for fmt, one in content["frozen"].items()
    )
    return (
        f"{content['what']}:\n\n{markdown(header, body)}\n\nThe weights of these layers frozen for "
        f"inference: {frozen}. {pages.machine(content['environment'])}"
    )
