"""Argument checks of linear and conv2d."""

from __future__ import annotations

import torch

from .._local_gradients import is_copy, watch
from ..ops._dispatch import checks
from ..recipes import Recipe
from .operands import Delayed


def check_output(
    op: str, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: object, bias_shape: str
) -> None:
    """Check the bias, [N] for N outputs of the weight, and the dtype of the result."""
    if bias is not None:
        checks.has_dtype(op, "bias", bias, (*checks.FLOATS, torch.float64))
        checks.has_shape(op, "bias", bias, (weight.shape[0],), bias_shape)
        checks.on_device(op, "bias", bias, weight.device, "x")
    if out_dtype not in checks.FLOATS:
        raise ValueError(f"{op}: out_dtype must be float32, bfloat16 or float16, got {out_dtype}")


def check_state(
    op: str,
    recipe: Recipe,
    delayed: Delayed | None,
    clipped: torch.Tensor | None,
    device: torch.device,
    module: str,
) -> None:
    """Check the tensors that a recipe updates."""
    if recipe.is_delayed and delayed is None:
        raise ValueError(
            f"{op}: recipe {recipe.name} has delayed scaling, whose state must be given as "
            f"`delayed`: use {module}, which keeps it"
        )
    if clipped is not None:
        checks.is_scalar(op, "clipped", clipped, torch.int64)
        checks.on_device(op, "clipped", clipped, device, "x")


def main_grad_of(op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """weight.main_grad, to which the gradient is added, if there is one and `grad` is None."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or is_copy(main_grad):
        return None
    if not weight.requires_grad or weight.grad is not None:
        return None
    checks.is_like(op, "weight.main_grad", main_grad, weight, (torch.float32,), "weight")
    if weight.is_leaf and not torch.compiler.is_compiling():  # which comes later, or has no hooks
        watch(weight, _add_to_main_grad)
    return main_grad


def _add_to_main_grad(weight: torch.Tensor) -> None:
    """A hook for gradients from elsewhere, such as those of an embedding tied to the layer."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and weight.grad is not None and not is_copy(main_grad):
        main_grad.add_(weight.grad)
        weight.grad = None
