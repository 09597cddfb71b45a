"""quantize_mx: a tensor in a block format, and in the same pass its transpose and amax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import block_formats
from .amax import amax_into
from .block_formats import encode_element, mx_scale, nvfp4_scale
from .launch import FORMATS, codes, on, soft_cast
from .philox import philox
from .tiles import ceil_div, decode, int64, magnitude_bits, scale_from_amax

TILE_M, TILE_K = 64, 64  # whole blocks in both directions
WARPS = 4  # 8 where scales are swizzled: 4 spill registers on 8.9


@triton.jit
def _random(lines, start, padded, seed, STREAM: tl.constexpr, LINES: tl.constexpr,
            N: tl.constexpr):  # fmt: skip
    """16 bits, as uint32 [LINES, N], of each element of lines that are `padded` long."""
    first = (lines * padded + start) // 8
    eighth = first[:, None] + tl.arange(0, N // 8)[None, :]
    low, high = eighth.to(tl.uint32), (eighth >> 32).to(tl.uint32)
    zeros = tl.zeros((LINES, N // 8), tl.uint32)
    w0, w1, w2, w3 = philox(low, high, zeros, zeros + (STREAM << 30), seed)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., word // 2, word % 2]
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (LINES, N))


@triton.jit
def _quantize(x, data_ptr, scale_inv_ptr, seed_ptr, line, start, count, length, add, scale,
              LINES: tl.constexpr, N: tl.constexpr, STREAM: tl.constexpr, ELEMENT: tl.constexpr,
              BITS: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
              MAX_BITS: tl.constexpr, NVFP4: tl.constexpr, BLOCK: tl.constexpr,
              SWIZZLED: tl.constexpr, SOFT_CAST: tl.constexpr):  # fmt: skip
    """The elements x [LINES, N] from `start` on of `count` lines from `line` on, each of `length`
    elements. x is 0 outside. Returns the amax of each line, as bits."""
    BLOCKS: tl.constexpr = N // BLOCK
    lines = line + tl.arange(0, LINES)
    across = ceil_div(length, BLOCK)
    x = tl.reshape(x, (LINES, BLOCKS, BLOCK))
    amax = tl.max(magnitude_bits(x), axis=2)
    if NVFP4:
        stored, factor = nvfp4_scale(amax, scale, SOFT_CAST)
    else:
        stored, factor = mx_scale(amax, add, MAX_BITS)
    block = start // BLOCK + tl.arange(0, BLOCKS)
    inside = (lines < count)[:, None] & (block < across)[None, :]
    at_scale = lines[:, None] * across + block[None, :]
    if SWIZZLED:  # see swizzle in mixprec/ops/_reference/scale_layout.py
        stored = tl.where(inside, stored, tl.zeros_like(stored))
        # All of these are in one tile of 128 lines and 4 blocks, which programs fill with zeros.
        tile = line // 128 * ceil_div(across, 4) + start // BLOCK // 4
        row = (line % 128).to(tl.int32) + tl.arange(0, LINES)
        col = (start // BLOCK % 4).to(tl.int32) + tl.arange(0, BLOCKS)
        at_scale = tile * 512 + (row % 32 * 16 + row // 32 * 4)[:, None] + col[None, :]
        inside = (row < 128)[:, None] & (block < ceil_div(across, 4) * 4)[None, :]
    tl.store(scale_inv_ptr + at_scale, stored, mask=inside)

    finite = (amax < 0x7F800000)[:, :, None]
    y = tl.reshape(tl.where(finite, x, 0.0) * factor[:, :, None], (LINES, N))
    random = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        random = _random(lines, start, int64(across) * BLOCK, seed, STREAM, LINES, N)
    code = encode_element(y, random, ELEMENT, BITS, MANTISSA, LEAST, MAX_BITS, SOFT_CAST)
    PER_BYTE: tl.constexpr = 2 if BITS == 4 else 1
    if BITS == 4:  # elements beyond the last one are 0
        low, high = tl.split(tl.reshape(code, (LINES, N // 2, 2)))
        code = low | (high << 4)
    size = ceil_div(length, PER_BYTE)
    at = start // PER_BYTE + tl.arange(0, N // PER_BYTE)
    inside = (lines < count)[:, None] & (at < size)[None, :]
    tl.store(data_ptr + lines[:, None] * size + at[None, :], code, mask=inside)
    return tl.max(amax, axis=1)


@triton.jit
def quantize_mx_kernel(
    x_ptr,  # [M, K]
    data_ptr,
    data_t_ptr,  # None without transpose
    scale_inv_ptr,
    scale_inv_t_ptr,
    tensor_scale_inv_ptr,  # NVFP4 only
    amax_ptr,  # int32 bits: with NVFP4 the amax of x, otherwise None, or initially 0 and updated
    seed_ptr,  # None: to nearest
    M,
    K,
    add,  # to the bits of the amax of a block, MX only
    X: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    MAX_BITS: tl.constexpr,
    NVFP4: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = ceil_div(K, 128) * (128 // TILE_K) if SWIZZLED else ceil_div(K, TILE_K)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    m, k = first_m + tl.arange(0, TILE_M), first_k + tl.arange(0, TILE_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=inside, other=0)
    x = decode(x, X, SOFT_CAST)
    scale = tl.full((), 1.0, tl.float32)
    if NVFP4:
        amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, 2688.0, 1.0, 1.0, False)
        if tl.program_id(0) == 0:
            tl.store(tensor_scale_inv_ptr, tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
    line_amax = _quantize(x, data_ptr, scale_inv_ptr, seed_ptr, first_m, first_k, M, K, add, scale,
                          TILE_M, TILE_K, 0, ELEMENT, BITS, MANTISSA, LEAST, MAX_BITS, NVFP4, BLOCK,
                          SWIZZLED, SOFT_CAST)  # fmt: skip
    if not NVFP4 and amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(line_amax, axis=0), sem="relaxed")
    if data_t_ptr is not None:
        _quantize(tl.trans(x), data_t_ptr, scale_inv_t_ptr, seed_ptr, first_k, first_m, K, M, add,
                  scale, TILE_K, TILE_M, 1, ELEMENT, BITS, MANTISSA, LEAST, MAX_BITS, NVFP4, BLOCK,
                  SWIZZLED, SOFT_CAST)  # fmt: skip


def quantize_mx(
    x: torch.Tensor,
    fmt: str,
    scale_mode: str,
    transpose: bool,
    seed: torch.Tensor | None,
    swizzled: bool,
    with_amax: bool,
) -> tuple[torch.Tensor, ...]:
    """x of any strides; one launch for MX, two for NVFP4."""
    x = x.contiguous()
    nvfp4 = fmt == "nvfp4"
    M, K = (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
    size, across = block_formats.sizes(fmt, K)
    size_t, across_t = block_formats.sizes(fmt, M)
    shape = (*x.shape[:-1], size) if x.dim() else ()

    def bytes_of(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.uint8, device=x.device)

    def scales_of(rows: int, blocks: int) -> torch.Tensor:
        if not swizzled:
            return bytes_of(rows, blocks)
        return bytes_of(triton.cdiv(rows, 128), triton.cdiv(blocks, 4), 32, 16)

    data, scale_inv = bytes_of(*shape), scales_of(M, across)
    data_t, scale_inv_t = bytes_of(0, 0), bytes_of(0)
    if transpose:
        data_t, scale_inv_t = bytes_of(K, size_t), scales_of(K, across_t)
    with_amax = with_amax or nvfp4
    amax = torch.zeros(() if with_amax else (0,), dtype=torch.float32, device=x.device)
    tensor_scale_inv = torch.ones(() if nvfp4 else (0,), dtype=torch.float32, device=x.device)
    if x.numel():
        with on(x):
            if nvfp4:
                amax_into(x, amax)
            side = 128 if swizzled else 1  # tiles cover the padding of the scales, too
            tiles = [triton.cdiv(triton.cdiv(n, side) * side, tile)
                     for n, tile in ((M, TILE_M), (K, TILE_K))]  # fmt: skip
            quantize_mx_kernel[(tiles[0] * tiles[1],)](
                codes(x), data, data_t if transpose else None, scale_inv,
                scale_inv_t if transpose else None, tensor_scale_inv if nvfp4 else None,
                amax.view(torch.int32) if with_amax else None, seed, M, K,
                block_formats.rounding_of_amax(fmt, scale_mode), X=FORMATS[x.dtype],
                **block_formats.constants(fmt),
                SWIZZLED=swizzled, SOFT_CAST=soft_cast(x.device, x.dtype, torch.float8_e4m3fn),
                TILE_M=TILE_M, TILE_K=TILE_K, num_warps=WARPS * (1 + swizzled),
                enable_fp_fusion=False,
            )  # fmt: skip
    codes_of = block_formats.DTYPES.get(fmt, torch.uint8)
    scales = torch.float8_e4m3fn if nvfp4 else torch.uint8
    data, data_t = data.view(codes_of), data_t.view(codes_of)
    return (data, data_t, scale_inv.view(scales), scale_inv_t.view(scales), tensor_scale_inv, amax)
