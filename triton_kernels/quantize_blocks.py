"""quantize with a scale per row or block: by rows, or by tiles that also give the transpose."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, MAX, codes, on, soft_cast
from .tiles import ceil_div, decode, encode, int64, magnitude_bits, scale_from_amax

TILE = 128
ROW_BLOCK = 4096
WARPS = 8  # 64 elements of a tile per thread, in registers


@triton.jit
def _scale(bits, fmt_max, POWER_OF_TWO: tl.constexpr):
    return scale_from_amax(bits.to(tl.float32, bitcast=True), fmt_max, 1.0, 1.0, POWER_OF_TWO)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K]
    scale_inv_ptr,  # [M]
    amax_ptr,  # int32 bits, initially 0
    K,
    fmt_max,
    X: tl.constexpr,
    Q: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, which is read again from the cache for the cast."""
    first = tl.program_id(0) * int64(K)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, int64(K), BLOCK):
        inside = start + columns < K
        x = tl.load(x_ptr + (first + start + columns), mask=inside, other=0)
        largest = tl.maximum(largest, magnitude_bits(decode(x, X, SOFT_CAST)))
    amax = tl.max(largest, axis=0)
    scale = _scale(amax, fmt_max, POWER_OF_TWO)
    tl.store(scale_inv_ptr + tl.program_id(0), _inverse(scale))
    tl.atomic_max(amax_ptr, amax, sem="relaxed")
    for start in range(0, int64(K), BLOCK):
        inside = start + columns < K
        x = tl.load(x_ptr + (first + start + columns), mask=inside, other=0)
        x = decode(x, X, SOFT_CAST)
        q = encode(x, x * scale, Q, SOFT_CAST)
        tl.store(q_ptr + (first + start + columns), q, mask=inside)


# The maxima of rows and columns lie in one array, at any multiple of 4 bytes.
@triton.jit(do_not_specialize_on_alignment=["row_amax_ptr", "column_amax_ptr"])
def tile_maxima_kernel(
    x_ptr,  # [M, K]
    row_amax_ptr,  # [M] int32 bits, initially 0
    column_amax_ptr,  # [K], likewise
    M,
    K,
    X: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles_k = ceil_div(K, TILE)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=inside, other=0)
    bits = magnitude_bits(decode(x, X, SOFT_CAST))
    tl.atomic_max(row_amax_ptr + m, tl.max(bits, axis=1), mask=m < M, sem="relaxed")
    tl.atomic_max(column_amax_ptr + k, tl.max(bits, axis=0), mask=k < K, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["row_amax_ptr", "column_amax_ptr"])
def quantize_tiles_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K]
    q_t_ptr,  # [K, M], None without transpose
    scale_inv_ptr,
    scale_inv_t_ptr,  # None without transpose
    row_amax_ptr,  # [M], where BY is "row"
    column_amax_ptr,  # [K], where BY is "row"
    amax_ptr,  # int32 bits, initially 0
    M,
    K,
    fmt_max,
    X: tl.constexpr,
    Q: tl.constexpr,
    BY: tl.constexpr,  # the granularity
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles_k, tiles_m = ceil_div(K, TILE), ceil_div(M, TILE)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    m, k = tile_m * TILE + tl.arange(0, TILE), tile_k * TILE + tl.arange(0, TILE)
    inside = (m < M)[:, None] & (k < K)[None, :]
    offsets = m[:, None] * K + k[None, :]
    x = decode(tl.load(x_ptr + offsets, mask=inside, other=0), X, SOFT_CAST)
    bits = magnitude_bits(x)
    if BY == "row":
        row_amax = tl.load(row_amax_ptr + m, mask=m < M, other=0)
        row_scale = _scale(row_amax, fmt_max, POWER_OF_TWO)
        if tile_k == 0:
            tl.store(scale_inv_ptr + m, _inverse(row_scale), mask=m < M)
        q = encode(x, x * row_scale[:, None], Q, SOFT_CAST)
    elif BY == "block1x128":
        row_amax = tl.max(bits, axis=1)
        row_scale = _scale(row_amax, fmt_max, POWER_OF_TWO)
        tl.store(scale_inv_ptr + m * tiles_k + tile_k, _inverse(row_scale), mask=m < M)
        q = encode(x, x * row_scale[:, None], Q, SOFT_CAST)
    else:
        row_amax = tl.max(bits, axis=1)
        scale = _scale(tl.max(row_amax, axis=0), fmt_max, POWER_OF_TWO)
        tl.store(scale_inv_ptr + tile_m * tiles_k + tile_k, _inverse(scale))
        q = encode(x, x * scale, Q, SOFT_CAST)
    tl.store(q_ptr + offsets, q, mask=inside)
    tl.atomic_max(amax_ptr, tl.max(row_amax, axis=0), sem="relaxed")
    if q_t_ptr is not None:
        if BY == "block128x128":
            tl.store(scale_inv_t_ptr + tile_k * tiles_m + tile_m, _inverse(scale))
        else:
            if BY == "row":
                column_amax = tl.load(column_amax_ptr + k, mask=k < K, other=0)
                column_scale = _scale(column_amax, fmt_max, POWER_OF_TWO)
                if tile_m == 0:
                    tl.store(scale_inv_t_ptr + k, _inverse(column_scale), mask=k < K)
            else:
                column_scale = _scale(tl.max(bits, axis=0), fmt_max, POWER_OF_TWO)
                at = k * tiles_m + tile_m
                tl.store(scale_inv_t_ptr + at, _inverse(column_scale), mask=k < K)
            q = encode(x, x * column_scale[None, :], Q, SOFT_CAST)
        inside_t = (k < K)[:, None] & (m < M)[None, :]
        tl.store(q_t_ptr + k[:, None] * M + m[None, :], tl.trans(q), mask=inside_t)


def _scale_shape(granularity: str, M: int, K: int) -> tuple[int, int]:
    rows = triton.cdiv(M, TILE) if granularity == "block128x128" else M
    return rows, 1 if granularity == "row" else triton.cdiv(K, TILE)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, transpose: bool, granularity: str, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x contiguous, dtype FP8; one launch, two for rows with transpose."""
    M, K = (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    data_t = torch.empty((K, M) if transpose else (0, 0), dtype=dtype, device=x.device)
    scale_inv = torch.empty(_scale_shape(granularity, M, K), **fp32)
    scale_inv_t = torch.empty(_scale_shape(granularity, K, M) if transpose else (0,), **fp32)
    results = data, data_t, scale_inv, scale_inv_t
    if x.numel() == 0:
        scale_inv.fill_(1.0)
        scale_inv_t.fill_(1.0)
        return *results, torch.zeros((), **fp32)
    by_lines = transpose and granularity == "row"
    maxima = torch.zeros(1 + (M + K if by_lines else 0), dtype=torch.int32, device=x.device)
    amax, row_amax, column_amax = maxima[0], maxima[1 : M + 1], maxima[M + 1 :]
    casts = {"X": FORMATS[x.dtype], "SOFT_CAST": soft_cast(x.device, x.dtype, dtype)}
    constants = {**casts, "Q": FORMATS[dtype], "POWER_OF_TWO": power_of_two, "num_warps": WARPS}
    with on(x):
        if granularity == "row" and not transpose:
            quantize_rows_kernel[(M,)](
                codes(x), codes(data), scale_inv, amax, K, MAX[dtype], **constants, BLOCK=ROW_BLOCK
            )
        else:
            grid = (triton.cdiv(M, TILE) * triton.cdiv(K, TILE),)
            if by_lines:
                tile_maxima_kernel[grid](
                    codes(x), row_amax, column_amax, M, K, **casts, TILE=TILE, num_warps=WARPS
                )
            quantize_tiles_kernel[grid](
                codes(x), codes(data), codes(data_t) if transpose else None, scale_inv,
                scale_inv_t if transpose else None, row_amax if by_lines else None,
                column_amax if by_lines else None, amax, M, K, MAX[dtype], **constants,
                BY=granularity, TILE=TILE,
            )  # fmt: skip
    return *results, amax.view(torch.float32)
