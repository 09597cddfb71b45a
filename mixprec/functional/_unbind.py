"""unbind, whose gradient lies in memory as the tensor does."""

from __future__ import annotations

from typing import Any

import torch


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.sizes, ctx.dtype, ctx.device = dim, x.shape, x.dtype, x.device
        ctx.strides = torch.empty_like(x, device="meta").stride()
        ctx.set_materialize_grads(False)
        return x.detach().unbind(dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        dx = torch.empty_strided(ctx.sizes, ctx.strides, dtype=ctx.dtype, device=ctx.device)
        for i, g in enumerate(grads):
            to = dx.select(ctx.dim, i)
            to.zero_() if g is None else to.copy_(g)
        return dx, None


def unbind(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """input.unbind(dim). torch's gradient is a stack along dim, contiguous, which is copied once
    more where q, k and v, in one tensor, lie otherwise in memory; this one is written in place."""
    if not input.requires_grad or not torch.is_grad_enabled() or input.dim() == 0:
        return input.unbind(dim)
    outputs: Any = _Unbind.apply(input, dim)
    return tuple(outputs)
