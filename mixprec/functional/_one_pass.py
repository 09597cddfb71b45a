"""Norms, activations and rotary positions in one pass, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..ops._dispatch import checks
from ..ops._dispatch.casts import Cast
from ..ops.act_quantize import act_backward_op, act_quantize_op
from ..ops.attention import rotary as rotated
from ..ops.norm_quantize import norm_backward_op, norm_quantize_op
from ._derivatives import NO_SECOND, apply, on_backend_of_forward


class RowNorm(torch.autograd.Function):
    """The norm of the last dimension of x as `norm_linear` describes it, rounded once, to dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        subtract_mean: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        y, *_, mean, rstd = norm_quantize_op(
            x, None, weight, bias, eps, subtract_mean, *Cast(dtype)
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = context.backend
        # Not a view: autograd forbids in-place ops on it.
        return y if y._base is None else torch.ops.aten._unsafe_view.default(y, y.shape)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        with_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dx, dw, db = norm_backward_op(g, x, weight, mean, rstd, None, with_bias)
        return (
            dx if ctx.needs_input_grad[0] else None,
            dw.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            db.to(ctx.bias_dtype) if with_bias else None,
            *[None] * 3,
        )


class Activation(torch.autograd.Function):
    """The activation `kind` of `mixprec.act_quantize` of x, computed in FP32, in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind, ctx.backend = kind, context.backend
        ctx.save_for_backward(x)
        y = act_quantize_op(x, None, kind, *Cast(x.dtype))[0]
        # Not a view: autograd forbids in-place ops on it.
        return y if y._base is None else torch.ops.aten._unsafe_view.default(y, y.shape)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        dx = act_backward_op(g, x, None, ctx.kind, *Cast(x.dtype))[0]
        return dx.view(x.shape), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend = interleaved, context.backend
        return rotated(x, cos, sin, interleaved)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # By the function where it is to be differentiated again.
        turn = _Rotary.apply if torch.is_grad_enabled() else rotated
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
