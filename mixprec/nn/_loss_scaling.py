"""Warn once if an fp16 recipe is trained without loss scaling."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..recipes import Recipe

_layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose gradients are fp16
_fine: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # without params of these layers
_hooked = _warned = False


def follow(layer: torch.nn.Module, recipe: Recipe | None) -> None:
    """Include `layer` in the check if its recipe needs loss scaling."""
    global _hooked
    if recipe is None or not recipe.needs_loss_scaling:
        _layers.discard(layer)
        return
    _layers.add(layer)
    _fine.clear()
    if not _hooked:
        register_optimizer_step_pre_hook(_before_step)
        _hooked = True


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """For optimizers of mixprec only, which know whether a GradScaler drives the step. Torch's are
    stepped in the same way with and without one."""
    global _warned
    scaling = getattr(optimizer, "_current_scaling", None)
    if _warned or optimizer in _fine or scaling is None or scaling().found_inf is not None:
        return
    weights = {id(layer._first_weight) for layer in _layers}
    if not any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
        _fine.add(optimizer)
        return
    _warned = True
    warnings.warn(
        "a model with an fp16 recipe is being trained without loss scaling: gradients below 6e-8 "
        "become 0. Use scaler = mixprec.GradScaler(), scaler.scale(loss).backward(), "
        "scaler.step(optimizer), scaler.update(); or a bf16 recipe",
        stacklevel=4,
    )
