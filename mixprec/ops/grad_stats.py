"""grad_stats_: read all gradients once, for their norms and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from .unscale import check_grads, count_reference


def grad_stats_reference_(args: Any) -> None:
    grads, inv_scale, found_inf, sum_sq, counts = args
    for i, grad in enumerate(grads):
        wide = grad if grad.dtype == torch.float64 else grad.float()
        if inv_scale is not None:
            wide = wide * inv_scale.reshape(()).to(wide.dtype)
        bad = ~(torch.isfinite(grad).all() & torch.isfinite(wide).all())
        found_inf.masked_fill_(bad, 1.0)
        sum_sq[i] = wide.double().square().sum()
        if counts is not None:
            counts[i] = count_reference(grad, wide)


def _check(args: Any) -> None:
    op = "grad_stats_"
    grads, inv_scale, found_inf, sum_sq, _ = args
    check_grads(op, args)
    if inv_scale is not None:
        checks.is_scalar(op, "inv_scale", inv_scale, torch.float32, found_inf, "found_inf")
    shape = (len(grads),)
    checks.is_table(op, "sum_sq", sum_sq, torch.float64, shape, found_inf, "found_inf")


grad_stats_op = Op(
    "grad_stats_",
    "(Tensor[] grads, Tensor? inv_scale, Tensor(a!) found_inf, Tensor(b!) sum_sq, "
    "Tensor(c!)? counts) -> ()",
    reference=grad_stats_reference_,
    check=_check,
    triton="unscale",
)


def grad_stats_(
    grads: Sequence[torch.Tensor],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    sum_sq: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """sum_sq[i] <- sum of (g * inv_scale)^2 over grads[i]; found_inf <- 1.0 if one is not finite.

    grads: list of n tensors of any shapes, fp32, bf16, fp16 or fp64, only read. inv_scale: fp32,
    one element, or None for 1. found_inf: fp32, one element; set to 1.0 if a value is Inf or NaN
    before or after the multiplication, else unchanged. sum_sq: fp64 [n], overwritten. counts: int64
    [n, 4], overwritten with the numbers of elements of grads[i] that are Inf, NaN (before or after
    the multiplication), 0, and subnormal in the gradient's dtype (both before it).

    The products are FP32 (FP64 for fp64 gradients), the squares and their sums FP64 in a fixed
    order: two runs give the same bits, and finite gradients of any size do not overflow them.
    """
    if torch.is_grad_enabled():
        checks.is_sequence("grad_stats_", "grads", grads)
        checks.needs_no_grad("grad_stats_", "call it under torch.no_grad()", *grads)
    grad_stats_op(grads, inv_scale, found_inf, sum_sq, counts)
