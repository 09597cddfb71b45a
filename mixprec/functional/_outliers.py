"""Input features that a layer's three products read in bf16, beside others in few bits."""

from __future__ import annotations

from typing import Any

import torch

from ..ops._reference.gemm_scales import Operands
from ..ops.gemm import accumulate
from ..ops.gemm import run as gemm
from ..recipes import OUTLIERS
from ._observed import observe


def split(t: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t [..., K] with 0 in these columns, and the columns [M, k] in bf16."""
    part = t.index_select(-1, indices).to(torch.bfloat16)
    return t.index_fill(-1, indices, 0.0), part.reshape(-1, indices.shape[0])


def add(total: torch.Tensor, x: torch.Tensor, w: torch.Tensor, name: str, on: str | None) -> None:
    """total [M, N] += x [M, k] @ w [N, k]^T, in FP32."""
    observe("forward", OUTLIERS, name)
    accumulate(total, Operands(x, w.t()), on)


def put(
    ctx: Any,
    g: torch.Tensor,
    indices: torch.Tensor,
    input_and_w: tuple[torch.Tensor | None, torch.Tensor | None],
    weight_and_x: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Compute these columns of the gradient of a layer's input [M, K] from w [N, k], and of its
    weight [N, K], or of ctx.main_grad, from x [M, k], where there are these."""
    _, name, simulated = ctx.gemms
    rows = g.to(torch.bfloat16).reshape(-1, g.shape[-1])
    (of_input, w), (of_weight, x) = input_and_w, weight_and_x
    if of_input is not None and w is not None:
        observe("grad_input", OUTLIERS, name)
        columns = gemm(Operands(rows, w), None, of_input.dtype, False, simulated)
        of_input.index_copy_(1, indices, columns)
    if x is None:
        return
    observe("grad_weight", OUTLIERS, name)
    dtype = torch.float32 if of_weight is None else of_weight.dtype
    columns = gemm(Operands(rows.t(), x), None, dtype, False, simulated)
    if of_weight is None:
        ctx.main_grad.index_add_(1, indices, columns)
    else:
        of_weight.index_copy_(1, indices, columns)
