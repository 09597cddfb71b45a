"""quantize with a scale per row or block: by rows, or by tiles that also give the transpose."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import on
from .source import TILE, Source, target_of, to_cast, values
from .tiles import ceil_div, encode, int64, magnitude_bits, scale_from_amax

ROW_BLOCK = 4096
PARTS = 4  # of a tile of computed values: registers hold no more of what it takes to compute them
WARPS = 8  # 64 elements of a tile per thread, in registers


@triton.jit
def _scale(bits, to):
    amax = bits.to(tl.float32, bitcast=True)
    return scale_from_amax(amax, to.fmt_max, 1.0, 1.0, to.POWER_OF_TWO)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _quantize_row(source, result, to, i: tl.constexpr, row, K, BLOCK: tl.constexpr):
    """The i-th values of a row, which are read or computed again for the cast."""
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, int64(K), BLOCK):
        y = values(source, row, int64(start) + columns, None, K, False, to.SOFT_CAST)[i]
        largest = tl.maximum(largest, magnitude_bits(y))
    amax = tl.max(largest, axis=0)
    scale = _scale(amax, to)
    tl.store(result.scale_inv + row, _inverse(scale))
    tl.atomic_max(result.amax, amax, sem="relaxed")
    for start in range(0, int64(K), BLOCK):
        column = int64(start) + columns
        y = values(source, row, column, None, K, False, to.SOFT_CAST)[i]
        q = encode(y, y * scale, to.Q, to.SOFT_CAST)
        tl.store(result.data + (row * K + column), q, mask=column < K)


@triton.jit
def quantize_rows_kernel(
    source,
    results,  # scale_inv: [M]
    to,
    K,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(source.blocks):
        _quantize_row(source, results[i], to, i, row, K, BLOCK)


@triton.jit
def tile_maxima_kernel(source, results, M, K, SOFT_CAST: tl.constexpr, TILE: tl.constexpr):
    """row_amax and column_amax"""
    tiles_k = ceil_div(K, TILE)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE + tl.arange(0, TILE)
    for i in tl.static_range(source.blocks):
        y = values(source, m[:, None], k[None, :], M, K, False, SOFT_CAST)[i]
        bits, result = magnitude_bits(y), results[i]
        tl.atomic_max(result.row_amax + m, tl.max(bits, axis=1), mask=m < M, sem="relaxed")
        tl.atomic_max(result.column_amax + k, tl.max(bits, axis=0), mask=k < K, sem="relaxed")


@triton.jit
def _quantize_tile(source, result, to, i: tl.constexpr, tile_m, tile_k, M, K, BY: tl.constexpr,
                   TILE: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The i-th values of a tile. If it is one part, they stay in registers; in parts they are
    computed again for a cast that has to wait for the amax of all of them."""
    PART: tl.constexpr = TILE // PARTS
    tiles_k, tiles_m = ceil_div(K, TILE), ceil_div(M, TILE)
    k = tile_k * TILE + tl.arange(0, TILE)
    column = k[None, :]
    x = tl.zeros((PART, TILE), tl.float32)
    column_amax = tl.zeros((TILE,), tl.int32)
    for part in range(PARTS):
        m = tile_m * TILE + part * PART + tl.arange(0, PART)
        row = m[:, None]
        x = values(source, row, column, M, K, False, to.SOFT_CAST)[i]
        bits = magnitude_bits(x)
        column_amax = tl.maximum(column_amax, tl.max(bits, axis=0))
        if BY != "block128x128":
            if BY == "row":
                row_amax, at = tl.load(result.row_amax + m, mask=m < M, other=0), m
            else:
                row_amax, at = tl.max(bits, axis=1), m * tiles_k + tile_k
            row_scale = _scale(row_amax, to)
            if BY != "row" or tile_k == 0:
                tl.store(result.scale_inv + at, _inverse(row_scale), mask=m < M)
            q = encode(x, x * row_scale[:, None], to.Q, to.SOFT_CAST)
            tl.store(result.data + (row * K + column), q, mask=(row < M) & (column < K))
    amax = tl.max(column_amax, axis=0)
    tl.atomic_max(result.amax, amax, sem="relaxed")
    if BY == "block128x128":
        block_scale = _scale(amax, to)
        tl.store(result.scale_inv + tile_m * tiles_k + tile_k, _inverse(block_scale))
        if result.data_t is not None:
            tl.store(result.scale_inv_t + tile_k * tiles_m + tile_m, _inverse(block_scale))
    elif result.data_t is not None:
        at = k * tiles_m + tile_m
        if BY == "row":
            column_amax, at = tl.load(result.column_amax + k, mask=k < K, other=0), k
        column_scale = _scale(column_amax, to)
        if BY != "row" or tile_m == 0:
            tl.store(result.scale_inv_t + at, _inverse(column_scale), mask=k < K)
        block_scale = column_scale[None, :]
    if BY == "block128x128" or result.data_t is not None:
        for part in range(PARTS):
            m = tile_m * TILE + part * PART + tl.arange(0, PART)
            row = m[:, None]
            if PARTS > 1:
                x = values(source, row, column, M, K, False, to.SOFT_CAST)[i]
            q = encode(x, x * block_scale, to.Q, to.SOFT_CAST)
            if BY == "block128x128":
                tl.store(result.data + (row * K + column), q, mask=(row < M) & (column < K))
            if result.data_t is not None:
                inside_t = (k[:, None] < K) & (m[None, :] < M)
                tl.store(result.data_t + (k[:, None] * M + m[None, :]), tl.trans(q), mask=inside_t)


@triton.jit
def quantize_tiles_kernel(
    source,
    results,  # without transpose no data_t; where BY is "row", row_amax and column_amax
    to,
    M,
    K,
    BY: tl.constexpr,  # the granularity
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles_k = ceil_div(K, TILE)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    for i in tl.static_range(source.blocks):
        _quantize_tile(source, results[i], to, i, tile_m, tile_k, M, K, BY, TILE, PARTS)


def quantize_blocks(source: Source, cast: Any) -> list[tuple[torch.Tensor, ...]]:
    """To FP8; one launch, two for rows with transpose."""
    M, K = source.size()
    made, results = zip(*(to_cast(source, cast) for _ in range(source.blocks.value)), strict=True)
    if source.x.numel() == 0:
        for _, _, scale_inv, scale_inv_t, _ in made:
            scale_inv.fill_(1.0)
            scale_inv_t.fill_(1.0)
        return list(made)
    by_rows, plain = cast.granularity == "row", source.is_plain()
    to = target_of(source, cast)
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    with on(source.x):
        if by_rows and not cast.transpose:
            quantize_rows_kernel[(M,)](source, results, to, K, **options, BLOCK=ROW_BLOCK)
        else:
            tile = TILE // 2 if by_rows and not plain else TILE
            grid = (triton.cdiv(M, tile) * triton.cdiv(K, tile),)
            if by_rows:
                tile_maxima_kernel[grid](
                    source, results, M, K, SOFT_CAST=to.SOFT_CAST, **options, TILE=tile
                )
            else:
                options["num_warps"] = source.warps(WARPS)
            quantize_tiles_kernel[grid](
                source, results, to, M, K, BY=cast.granularity, **options, TILE=tile,
                PARTS=1 if by_rows or plain else PARTS,
            )  # fmt: skip
    return list(made)
