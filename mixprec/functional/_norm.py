"""RMSNorm and LayerNorm in one pass, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..ops._dispatch.casts import Cast
from ..ops.norm_quantize import norm_backward_op, norm_quantize_op
from ._derivatives import NO_SECOND, on_backend_of_forward


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
