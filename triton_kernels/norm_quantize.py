"""norm_quantize: a pass over the rows finds their statistics, and casts where that takes no more;
otherwise the casting kernels compute the values that they cast."""

from __future__ import annotations

from typing import Any

import torch
import triton

from .launch import codes, codes_in_order, on
from .norm_backward import norm_backward
from .norm_rows import LANES, norm_rows_kernel
from .quantize import cast_from, constants, to_cast
from .source import Result, source_of

__all__ = ["norm_backward", "norm_quantize"]

TOGETHER = 4096  # elements of the rows that a program takes one after the other


def norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    subtract_mean: bool,
    cast: Any,
) -> tuple[torch.Tensor, ...]:
    x = x.contiguous()
    M, K = x.shape[:-1].numel(), x.shape[-1]
    total = torch.empty((0,) if residual is None else x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (
        torch.empty((n,), dtype=torch.float32, device=x.device)
        for n in (M if subtract_mean else 0, M)
    )
    source = source_of(x if residual is None else total, rstd=rstd, weight=weight, bias=bias)
    source = source._replace(mean=mean if subtract_mean else None)

    def rows(purpose: str, result: Result) -> None:
        together = triton.cdiv(TOGETHER, max(1, K))
        with on(x):
            norm_rows_kernel[(triton.cdiv(M, together),)](
                codes(x), codes_in_order(residual), source, result, M, K, together, eps,
                PASS=purpose, LANES=LANES, num_warps=1, **constants(source, cast),
            )  # fmt: skip

    by_tensor = cast.granularity == "tensor" and x.numel() > 0
    of_amax = by_tensor and cast.dtype.itemsize == 1
    if by_tensor and not cast.transpose:
        made, result = to_cast(source, cast, cast.scale)
        if of_amax:
            rows("amax", result)
        rows("cast", result)
    else:
        amax = torch.zeros((), dtype=torch.float32, device=x.device) if of_amax else None
        if amax is not None:
            rows("amax", Result(scale=cast.scale, amax=amax.view(torch.int32)))
        if M and (amax is None or cast.scale is not None):
            rows("statistics", Result())
        made = cast_from(source, cast, amax)
    return *made, total, mean, rstd
