"""Argument checks of linear and convolution."""

from __future__ import annotations

import torch

from .._local_gradients import is_copy, watch
from ..ops._dispatch import checks
from ..recipes import Recipe
from .operands import Delayed


def check_output(
    op: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: object,
    bias_shape: str,
    outputs: int | None = None,
) -> None:
    """Check the bias, [N] for N outputs of the weight (None: its rows), and the result's dtype."""
    if bias is not None:
        checks.has_dtype(op, "bias", bias, (*checks.FLOATS, torch.float64))
        checks.has_shape(op, "bias", bias, (outputs or weight.shape[0],), bias_shape)
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


def check_outliers(
    op: str, recipe: Recipe, indices: torch.Tensor | None, features: int, device: torch.device
) -> None:
    """Check the indices of a recipe with outliers, on a CPU also their values."""
    if indices is None and not recipe.has_outliers:
        return
    if indices is None:
        raise ValueError(
            f"{op}: recipe {recipe.name} has outliers, whose indices must be given as `outliers`: "
            "use mixprec.nn.Linear, which keeps them"
        )
    if not recipe.has_outliers:
        raise ValueError(f"{op}: outliers must be None: recipe {recipe.name} has none")
    checks.has_dtype(op, "outliers", indices, (torch.int64,))
    checks.on_device(op, "outliers", indices, device, "x")
    wrong = indices.dim() != 1 or not indices.numel()
    if not wrong and device.type == "cpu" and not torch.compiler.is_compiling():
        inside = bool(((indices >= 0) & (indices < features)).all())
        wrong = not inside or indices.unique().numel() < indices.numel()
    if wrong:
        raise ValueError(
            f"{op}: outliers must be one or more different indices of the {features} features, "
            f"got {indices.tolist()}"
        )


def no_outliers(op: str, recipe: Recipe) -> None:
    """ValueError from an op that cannot have any."""
    if recipe.has_outliers:
        raise ValueError(
            f"{op}: recipe must have no outliers, which only linear layers have, got {recipe.name}"
        )


def main_grad_of(op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """weight.main_grad, to which the gradient is added, if there is one and `grad` is None. (None
    where hooks wait for it: they get it rounded, from autograd, before it is added.)"""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or is_copy(main_grad):
        return None
    if not weight.requires_grad or weight.grad is not None:
        return None
    checks.is_like(op, "weight.main_grad", main_grad, weight, (torch.float32,), "weight")
    watch_main_grad(weight)
    return None if _has_hooks(weight) else main_grad


def _has_hooks(weight: torch.Tensor) -> bool:
    """Whether others than `watch_main_grad` have registered hooks for its gradient. (torch.compile
    does not know.)"""
    if torch.compiler.is_compiling():
        return False
    after = weight._post_accumulate_grad_hooks or {}
    return bool(weight._backward_hooks) or any(h is not _add_to_main_grad for h in after.values())


def watch_main_grad(param: torch.Tensor) -> None:
    """Have gradients of `param` that arrive in `grad` added to its main_grad, if it has one."""
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None or is_copy(main_grad) or not param.requires_grad:
        return
    if param.is_leaf and not torch.compiler.is_compiling():  # which comes later, or has no hooks
        watch(param, _add_to_main_grad)


def _add_to_main_grad(weight: torch.Tensor) -> None:
    """A hook for gradients from elsewhere, such as those of an embedding tied to the layer."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and weight.grad is not None and not is_copy(main_grad):
        main_grad.add_(weight.grad)
        weight.grad = None
