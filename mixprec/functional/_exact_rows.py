"""Matrix products of which each row has the same bits whatever rows are beside it."""

from __future__ import annotations

from typing import Any

import torch

from ..ops._reference.gemm_scales import Operands
from ..ops.gemm import run
from ..ops.gemm_grouped import gemm_grouped_op
from ._derivatives import NO_SECOND, on_backend_of_forward


def _as(product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """As torch's matmul, no view, so that code may write into the result."""
    return torch.ops.aten._unsafe_view(product, shape)


class _Products(torch.autograd.Function):
    """a [E, M, K] @ b [E, K, N], whose gradients are torch's products."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.backend = None
        e, m, k = a.shape
        if e == 1:
            return _as(run(Operands(a[0], b[0]), None, a.dtype, False, None), (1, m, b.shape[-1]))
        ends = torch.arange(m, (e + 1) * m, m, dtype=torch.int32)[:e]
        y = gemm_grouped_op(a.reshape(e * m, k), b, None, None, ends, a.dtype, False)
        return _as(y, (e, m, b.shape[-1]))

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        need_a, need_b = ctx.needs_input_grad
        return (g @ b.mT if need_a else None), (a.mT @ g if need_b else None)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul of a [..., M, K] and b [..., K, N] of one dtype, fp32, bf16 or fp16, summed in
    FP32 in ascending order of K."""
    (*batch_a, m, k), (*batch_b, _, n) = a.shape, b.shape
    if not batch_b:
        return _as(_Products.apply(a.reshape(1, -1, k), b.unsqueeze(0)), (*batch_a, m, n))
    batch = torch.broadcast_shapes(batch_a, batch_b)
    left, right = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return _as(_Products.apply(left, right), (*batch, m, n))
