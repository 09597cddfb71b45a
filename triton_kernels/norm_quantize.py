"""norm_quantize: a pass over the rows finds their statistics, and casts where that takes no more;
otherwise the casting kernels compute the values that they cast. Sums are in the order that
csrc/math/norm.h fixes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import codes, codes_in_order, on
from .quantize import cast_from, raise_amax, scale_of
from .source import Result, norm_values, source_of, target_of, to_cast
from .tiles import decode, encode, int64, magnitude_bits

TOGETHER = 4096  # elements of the rows that a program takes one after the other
LANES = 256  # partial sums of a row


@triton.jit
def _halved(partial, HALF: tl.constexpr):
    """partial[j] + partial[j + HALF]"""
    return tl.sum(tl.reshape(partial, (2, HALF)), axis=0)


@triton.jit
def row_sum(partial):
    partial = _halved(_halved(_halved(_halved(partial, 128), 64), 32), 16)
    return tl.sum(_halved(_halved(_halved(partial, 8), 4), 2), axis=0)


@triton.jit
def _statistics(x_ptr, residual_ptr, source, first, K, eps, SOFT_CAST: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    """Writes the sum with the residual, and returns mean, 0 for RMSNorm, and rstd."""
    lanes, k = tl.arange(0, LANES), int64(K).to(tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    for start in range(0, int64(K), LANES):
        column = start + lanes
        x = tl.load(x_ptr + (first + column), mask=column < K, other=0)
        x = decode(x, source.X, SOFT_CAST)
        if residual_ptr is not None:
            added = tl.load(residual_ptr + (first + column), mask=column < K, other=0)
            x += decode(added, source.X, SOFT_CAST)
            rounded = encode(x, x, source.X, SOFT_CAST)
            tl.store(source.x + (first + column), rounded, mask=column < K)
            x = decode(rounded, source.X, SOFT_CAST)
        total += x
        squares += x * x
    if residual_ptr is not None:
        tl.debug_barrier()
    mean = tl.zeros((), tl.float32)
    if source.mean is not None:
        mean = tl.div_rn(row_sum(total), k)
        squares = tl.zeros((LANES,), tl.float32)
        for start in range(0, int64(K), LANES):
            column = start + lanes
            x = tl.load(source.x + (first + column), mask=column < K, other=0)
            x = decode(x, source.X, SOFT_CAST) - mean
            squares += tl.where(column < K, x * x, 0.0)
    variance = tl.div_rn(row_sum(squares), k) + (tl.zeros((), tl.float64) + eps).to(tl.float32)
    rstd = tl.div_rn(tl.zeros((), tl.float32) + 1.0, tl.sqrt_rn(variance))
    return mean, rstd + 0.0 * variance  # an overflow is NaN, not 0


@triton.jit(do_not_specialize=["rows"])
def norm_rows_kernel(
    x_ptr,  # [M, K]
    residual_ptr,  # [M, K] or None
    source,  # x: x_ptr, or with a residual where the sum goes; mean and rstd: where they go
    result,  # of "amax" and "cast"
    M,
    K,
    to,
    rows,  # per program
    eps: tl.float64,
    PASS: tl.constexpr,  # "statistics"; "amax": with that of the values; "cast": with their cast
    LANES: tl.constexpr,
):
    """Memory is read once: a row is in the cache when it is read again."""
    if PASS == "amax":  # noqa: SIM102  (Triton's `and` loads from None, too)
        if result.scale is not None:  # noqa: SIM102
            if tl.load(result.scale) != 0.0:
                return
    if PASS == "cast":
        scale = scale_of(result, to)
    start_row = tl.program_id(0).to(tl.int64) * rows
    largest = tl.zeros((LANES,), tl.int32)
    for row in range(start_row, min(start_row + rows, M)):
        first = row * K
        mean, rstd = _statistics(x_ptr, residual_ptr, source, first, K, eps, to.SOFT_CAST, LANES)
        if source.mean is not None:
            tl.store(source.mean + row, mean)
        tl.store(source.rstd + row, rstd)
        if PASS != "statistics":
            for start in range(0, int64(K), LANES):
                column = start + tl.arange(0, LANES)
                x = tl.load(source.x + (first + column), mask=column < K, other=0)
                x = decode(x, source.X, to.SOFT_CAST)
                y = norm_values(x, mean, rstd, source, column, K, to.SOFT_CAST)
                largest = tl.maximum(largest, magnitude_bits(tl.where(column < K, y, 0.0)))
                if PASS == "cast":
                    q = encode(y, y * scale, to.Q, to.SOFT_CAST)
                    tl.store(result.data + (first + column), q, mask=column < K)
    if PASS == "amax":
        tl.atomic_max(result.amax, tl.max(largest, axis=0), sem="relaxed")
    elif PASS == "cast":
        raise_amax(result, largest, to)


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
                codes(x), codes_in_order(residual), source, result, M, K, target_of(source, cast),
                together, eps, PASS=purpose, LANES=LANES, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip

    by_tensor = cast.granularity == "tensor" and x.numel() > 0
    of_amax = by_tensor and cast.dtype.itemsize == 1
    if by_tensor and not cast.transpose:
        made, result = to_cast(source, cast, cast.scale, cast.record)
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
