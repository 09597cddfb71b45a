"""An activation in one pass, with its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..ops._dispatch.casts import Cast
from ..ops.act_quantize import act_backward_op, act_quantize_op
from ._derivatives import NO_SECOND, on_backend_of_forward


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
