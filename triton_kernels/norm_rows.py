"""A pass over the rows of a norm: their statistics, and what is known of the values with them.
Sums are in the order that csrc/math/norm.h fixes."""

import triton
import triton.language as tl

from .quantize import raise_amax, scale_of
from .source import norm_values
from .tiles import decode, encode, int64, magnitude_bits

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
    rows,  # per program
    eps: tl.float64,
    fmt_max,
    PASS: tl.constexpr,  # "statistics"; "amax": with that of the values; "cast": with their cast
    Q: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    LANES: tl.constexpr,
):
    """Memory is read once: a row is in the cache when it is read again."""
    if PASS == "amax":  # noqa: SIM102  (Triton's `and` loads from None, too)
        if result.scale is not None:  # noqa: SIM102
            if tl.load(result.scale) != 0.0:
                return
    if PASS == "cast":
        scale = scale_of(result, fmt_max, Q, POWER_OF_TWO)
    start_row = tl.program_id(0).to(tl.int64) * rows
    largest = tl.zeros((LANES,), tl.int32)
    for row in range(start_row, min(start_row + rows, M)):
        first = row * K
        mean, rstd = _statistics(x_ptr, residual_ptr, source, first, K, eps, SOFT_CAST, LANES)
        if source.mean is not None:
            tl.store(source.mean + row, mean)
        tl.store(source.rstd + row, rstd)
        if PASS != "statistics":
            for start in range(0, int64(K), LANES):
                column = start + tl.arange(0, LANES)
                x = tl.load(source.x + (first + column), mask=column < K, other=0)
                x = decode(x, source.X, SOFT_CAST)
                y = norm_values(x, mean, rstd, source, column, K, SOFT_CAST)
                largest = tl.maximum(largest, magnitude_bits(tl.where(column < K, y, 0.0)))
                if PASS == "cast":
                    q = encode(y, y * scale, Q, SOFT_CAST)
                    tl.store(result.data + (first + column), q, mask=column < K)
    if PASS == "amax":
        tl.atomic_max(result.amax, tl.max(largest, axis=0), sem="relaxed")
    elif PASS == "cast":
        raise_amax(result, largest, Q)
