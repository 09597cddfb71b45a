"""flop_share: how much of a model's arithmetic computes by a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...ops.gemm import gemm_op, gemm_simulated_op
from ...ops.gemm_grouped import gemm_grouped_op
from ..batches import call
from .layers import recipe_layers, state_here


def flop_share(model: nn.Module, batch: Any) -> float:
    """The share of the FLOPs of a forward pass that layers with a recipe compute by it.

    batch: the arguments of model as a tuple or list, as a dict (or another mapping) of keyword
    arguments, or one tensor. Runs the forward pass once without gradients (the backward pass is
    twice the same products) and counts with torch.utils.flop_counter: matrix products, convolutions
    and attention, 2 FLOPs for a multiplication and an addition. nan if there are none. As in any
    forward pass, batch norm in training mode updates its statistics.
    """
    from torch.utils import flop_counter  # imports Triton: not at the import of mixprec

    for op in (gemm_op, gemm_simulated_op, gemm_grouped_op):
        for variant in ("cpp", "reference", "triton", "vendor"):
            gemm = getattr(torch.ops.mixprec, op.variant_name(variant), None)
            if gemm is not None and gemm not in flop_counter.flop_registry:
                flop_counter.register_flop_formula(gemm)(_gemm_flops)
    counter = flop_counter.FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        call(model, batch)
    counts = counter.get_flop_counts()
    everything = counts.get("Global", {})
    total = sum(everything.values())
    # Ours, which fused functions call outside of the layers; attention also multiplies its heads as
    # torch does.
    by_recipe = sum(n for op, n in everything.items() if "mixprec" in str(op))
    outermost: list[str] = []
    for name, layer in recipe_layers(model):
        if state_here(layer) is None:  # mixprec.autocast has switched it off
            continue
        if not any(f".{name}".startswith(f"{other}.") for other in outermost):
            outermost.append(f".{name}" if name else "")
    for name in outermost:
        found = counts.get(type(model).__name__ + name, {})
        by_recipe += sum(n for op, n in found.items() if "convolution" in str(op))
    return by_recipe / total if total else float("nan")


def _gemm_flops(a: tuple[int, int], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Also of groups: each row of a, or each of K, is of one."""
    return 2 * a[0] * a[1] * b[-1]
