"""unscale_: divide the loss scale out of gradients, and find Inf and NaN, in one pass.

The simplest op of the library: read it first to see how an op is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op

COUNTS = 4  # Inf, NaN, zeros, subnormals


def count_reference(grad: torch.Tensor, unscaled: torch.Tensor) -> torch.Tensor:
    """int64 [4]: Inf and NaN before or after unscaling, zeros and subnormals before it."""
    nan = torch.isnan(grad) | torch.isnan(unscaled)
    inf = (torch.isinf(grad) | torch.isinf(unscaled)) & ~nan
    zero = grad == 0
    subnormal = (grad.abs() < torch.finfo(grad.dtype).smallest_normal) & ~zero
    return torch.stack([mask.sum() for mask in (inf, nan, zero, subnormal)])


# 1. The reference: the definition of the op in plain torch, for any device.
def unscale_reference_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    for i, grad in enumerate(grads):
        wide = grad if grad.dtype == torch.float64 else grad.float()
        unscaled = (wide * inv_scale.reshape(()).to(wide.dtype)).to(grad.dtype)
        bad = ~(torch.isfinite(grad).all() & torch.isfinite(unscaled).all())
        if counts is not None:
            counts[i] = count_reference(grad, unscaled)
        grad.copy_(unscaled)
        found_inf.masked_fill_(bad, 1.0)


def check_grads(op: str, args: Any) -> None:
    found_inf, shape = args.found_inf, (len(args.grads), COUNTS)
    checks.is_scalar(op, "found_inf", found_inf, torch.float32)
    for i, grad in enumerate(checks.is_list(op, "grads", args.grads)):
        checks.matches(op, f"grads[{i}]", grad, checks.REALS, found_inf, owner="found_inf")
    checks.is_table(op, "counts", args.counts, torch.int64, shape, found_inf, "found_inf")


# 2. The argument check, run by the fake kernel, the reference, and when a kernel raises.
def _check(args: Any) -> None:
    op = "unscale_"
    check_grads(op, args)
    checks.is_scalar(op, "inv_scale", args.inv_scale, torch.float32, args.found_inf, "found_inf")
    for i, grad in enumerate(args.grads):
        checks.is_writable(op, f"grads[{i}]", grad)
    checks.check_disjoint(op, "grads", args.grads)


# 3. The op: its schema, shared by all variants, and its functions. The C++ kernel is
# csrc/cpu/unscale.cpp, the CUDA kernel csrc/cuda/grads/unscale.cu.
unscale_op = Op(
    "unscale_",
    "(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf, Tensor(c!)? counts) -> ()",
    reference=unscale_reference_,
    check=_check,
    triton="unscale",
)


# 4. The public function.
def unscale_(
    grads: Sequence[torch.Tensor],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """g <- g * inv_scale for each gradient, in place; found_inf <- 1.0 if one is not finite.

    grads: list of tensors of any shapes, fp32, bf16, fp16 (FP32 arithmetic, one rounding to the
    gradient's dtype) or fp64 (FP64). inv_scale: fp32, one element, 1 / loss scale. found_inf:
    fp32, one element; set to 1.0 if a value is Inf or NaN before or after the multiplication,
    else unchanged (the caller clears it). counts: int64 [grads, 4], overwritten with the numbers of
    elements of each gradient that are Inf, NaN (before or after), 0, and subnormal in the
    gradient's dtype (both before). No host sync. TypeError or ValueError names an invalid argument
    before anything is written.
    """
    checks.is_sequence("unscale_", "grads", grads)
    checks.needs_no_grad("unscale_", "call it under torch.no_grad()", *grads)
    unscale_op(grads, inv_scale, found_inf, counts)
