"""dequantize_mx: from a block format, MX or NVFP4, back to fp32, bf16 or fp16."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import block_formats
from .block_formats import decode_element
from .launch import FORMATS, codes, on, soft_cast
from .tiles import ceil_div, decode, encode

TILE_M, TILE_K = 32, 128


@triton.jit
def dequantize_mx_kernel(
    data_ptr,  # [M, K], or [M, ceil(K / 2)] for codes of 4 bits
    scale_inv_ptr,  # [M, ceil(K / BLOCK)]
    tensor_scale_inv_ptr,  # None: 1
    out_ptr,  # [M, K]
    M,
    K,
    OUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    MAX_BITS: tl.constexpr,
    NVFP4: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 2 if BITS == 4 else 1
    BLOCKS: tl.constexpr = TILE_K // BLOCK
    tiles_k = ceil_div(K, TILE_K)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    first = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    across, size = ceil_div(K, BLOCK), ceil_div(K, PER_BYTE)
    block = first // BLOCK + tl.arange(0, BLOCKS)
    inside = (m < M)[:, None] & (block < across)[None, :]
    stored = tl.load(scale_inv_ptr + m[:, None] * across + block[None, :], mask=inside, other=0)
    if NVFP4:
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
    if BITS == 4:
        code = tl.reshape(tl.join(code & 15, code >> 4), (TILE_M, TILE_K))
    value = decode_element(code, ELEMENT, BITS, MANTISSA, LEAST, SOFT_CAST)
    value = tl.reshape(value, (TILE_M, BLOCKS, BLOCK)) * scale[:, :, None]
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
                OUT=FORMATS[dtype], **block_formats.constants(fmt),
                SOFT_CAST=soft_cast(data.device, torch.float8_e4m3fn), TILE_M=TILE_M,
                TILE_K=TILE_K, enable_fp_fusion=False,
            )  # fmt: skip
    return out
