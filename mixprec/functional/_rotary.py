"""rotary with gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..ops._dispatch import checks
from ..ops.rotary import rotary as run
from ._derivatives import apply, on_backend_of_forward


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend = interleaved, context.backend
        return run(x, cos, sin, interleaved)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # By the function where it is to be differentiated again.
        turn = _Rotary.apply if torch.is_grad_enabled() else run
        return turn(g, cos, -sin, ctx.interleaved), None, None, None


def _of_pairs(name: str, x: torch.Tensor, d: int, interleaved: bool) -> torch.Tensor:
    """One factor for each pair, [T, D/2] fp32, from [T, D/2] or [T, D]."""
    checks.is_tensor("rotary", name, x)
    checks.needs_no_grad("rotary", f"detach {name}", x)
    if x.dim() == 2 and x.shape[1] == d:
        x = x[:, ::2] if interleaved else x[:, : d // 2]
    return x.float()


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Return x with each pair of features rotated by an angle of its position, [B, H, T, D].

        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin

    x: [B, H, T, D], fp32, bf16 or fp16, any strides, D even. The pairs are the features i and
    i + D/2, with interleaved 2i and 2i + 1. cos, sin: [T, D/2]; or [T, D] with each number twice,
    at both features of its pair. They are read as FP32 and get no gradient. The result has the
    dtype of x and lies in memory as [B, T, H, D].

    The formula is FP32, every operation rounded, then one rounding to the dtype; all backends give
    the same bits. The gradient is the rotation by the opposite angle. A GPU runs the formula in
    torch. TypeError or ValueError names an invalid argument.

    Source: RoFormer (Su et al., 2021).
    """
    checks.is_tensor("rotary", "x", x)
    d = x.shape[-1] if x.dim() else 0
    factors = (_of_pairs(n, f, d, interleaved) for n, f in (("cos", cos), ("sin", sin)))
    return apply("rotary", _Rotary, x, *factors, bool(interleaved))
