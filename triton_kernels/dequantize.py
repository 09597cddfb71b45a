"""dequantize and dequantize_mx: from a low-precision tensor and its scales, or from a block format,
MX or NVFP4, back to fp32, bf16 or fp16."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import block_formats
from .block_formats import decode_element
from .launch import FORMATS, codes, on, soft_cast
from .tiles import ceil_div, decode, encode, load, store

BLOCK = 4096
TILE_M, TILE_K = 32, 128


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
    full = start + BLOCK <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            y = decode(load(q_ptr, offsets, n, FULL), Q, SOFT_CAST) * scale_inv
            store(out_ptr, offsets, encode(y, y, OUT, SOFT_CAST), n, FULL)


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


@triton.jit
def dequantize_mx_kernel(
    data_ptr,  # [M, K], or [M, ceil(K / 2)] for codes of 4 bits
    scale_inv_ptr,  # [M, ceil(K / F.BLOCK)]
    tensor_scale_inv_ptr,  # None: 1
    out_ptr,  # [M, K]
    M,
    K,
    F,  # the Format
    OUT: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 2 if F.BITS == 4 else 1
    BLOCKS: tl.constexpr = TILE_K // F.BLOCK
    tiles_k = ceil_div(K, TILE_K)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    first = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    across, size = ceil_div(K, F.BLOCK), ceil_div(K, PER_BYTE)
    block = first // F.BLOCK + tl.arange(0, BLOCKS)
    inside = (m < M)[:, None] & (block < across)[None, :]
    stored = tl.load(scale_inv_ptr + m[:, None] * across + block[None, :], mask=inside, other=0)
    if F.NVFP4:
        scale = decode(stored, "e4m3", SOFT_CAST)
        if tensor_scale_inv_ptr is not None:
            scale = scale * tl.load(tensor_scale_inv_ptr)
    else:
        wide = stored.to(tl.int32)
        bits = tl.where(wide == 0, 0x00400000, wide << 23)
        scale = tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)

    at = first // PER_BYTE + tl.arange(0, TILE_K // PER_BYTE)
    inside = (m < M)[:, None] & (at < size)[None, :]
    code = tl.load(data_ptr + m[:, None] * size + at[None, :], mask=inside, other=0)
    if F.BITS == 4:
        code = tl.reshape(tl.join(code & 15, code >> 4), (TILE_M, TILE_K))
    value = decode_element(code, F, SOFT_CAST)
    value = tl.reshape(value, (TILE_M, BLOCKS, F.BLOCK)) * scale[:, :, None]
    value = tl.reshape(value, (TILE_M, TILE_K))
    k = first + tl.arange(0, TILE_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    out = encode(value, value, OUT, SOFT_CAST)
    tl.store(out_ptr + m[:, None] * K + k[None, :], out, mask=inside)


def dequantize_mx(args: Any) -> torch.Tensor:
    data, scale_inv, tensor_scale_inv, fmt, columns, dtype = args
    data, scale_inv = data.contiguous(), scale_inv.contiguous()
    out = torch.empty((*data.shape[:-1], columns) if data.dim() else (), dtype=dtype,
                      device=data.device)  # fmt: skip
    if out.numel():
        M, K = out.numel() // columns, columns
        with on(data):
            dequantize_mx_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)](
                codes(data), codes(scale_inv), tensor_scale_inv, codes(out), M, K,
                block_formats.format_of(fmt), OUT=FORMATS[dtype],
                SOFT_CAST=soft_cast(data.device, torch.float8_e4m3fn), TILE_M=TILE_M,
                TILE_K=TILE_K, enable_fp_fusion=False,
            )  # fmt: skip
    return out
