"""dequantize: from a low-precision tensor and its scale back to fp32, bf16 or fp16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, on, soft_cast
from .tiles import ceil_div, decode, encode, load, store

BLOCK = 4096
TILE_M, TILE_K = 32, 128


@triton.jit
def _block(q_ptr, scale_inv, out_ptr, offsets, n, Q: tl.constexpr, OUT: tl.constexpr,
           SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    y = decode(load(q_ptr, offsets, n, FULL), Q, SOFT_CAST) * scale_inv
    store(out_ptr, offsets, encode(y, y, OUT, SOFT_CAST), n, FULL)


@triton.jit
def dequantize_kernel(
    q_ptr,
    scale_inv_ptr,
    out_ptr,
    n,
    Q: tl.constexpr,
    OUT: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale_inv = tl.load(scale_inv_ptr)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(q_ptr, scale_inv, out_ptr, offsets, n, Q, OUT, SOFT_CAST, True)
    else:
        _block(q_ptr, scale_inv, out_ptr, offsets, n, Q, OUT, SOFT_CAST, False)


@triton.jit
def dequantize_blocks_kernel(
    q_ptr,  # [M, K]
    scale_inv_ptr,  # one per ROWS rows and, unless BY_ROW, per 128 columns
    out_ptr,  # [M, K]
    M,
    K,
    stride_row,
    stride_column,
    Q: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,  # 128: a tile has one column of scales
):
    tiles_k = ceil_div(K, TILE_K)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = tile_k * TILE_K + tl.arange(0, TILE_K)
    at = (m // ROWS) * stride_row
    if not BY_ROW:
        at += tile_k * stride_column
    scale_inv = tl.load(scale_inv_ptr + at, mask=m < M, other=1.0)
    inside = (m < M)[:, None] & (k < K)[None, :]
    offsets = m[:, None] * K + k[None, :]
    q = decode(tl.load(q_ptr + offsets, mask=inside, other=0), Q, SOFT_CAST)
    y = q * scale_inv[:, None]
    tl.store(out_ptr + offsets, encode(y, y, OUT, SOFT_CAST), mask=inside)


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data = data.contiguous()
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    if data.numel() == 0:
        return out
    casts = {
        "Q": FORMATS[data.dtype],
        "OUT": FORMATS[dtype],
        "SOFT_CAST": soft_cast(data.device, data.dtype),
    }
    with on(data):
        if scale_inv.numel() == 1:
            dequantize_kernel[(triton.cdiv(data.numel(), BLOCK),)](
                codes(data), scale_inv, codes(out), data.numel(), **casts, BLOCK=BLOCK
            )
        else:
            M, K = data.shape[:-1].numel(), data.shape[-1]
            dequantize_blocks_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)](
                codes(data), scale_inv, codes(out), M, K, *scale_inv.stride(), **casts,
                ROWS=1 if scale_inv.shape[0] == M else TILE_K, BY_ROW=scale_inv.shape[1] == 1,
                TILE_M=TILE_M, TILE_K=TILE_K,
            )  # fmt: skip
    return out
