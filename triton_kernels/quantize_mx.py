"""quantize_mx: a tensor in a block format, and in the same pass its transpose and amax; the same of
values that a fused op computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import block_formats
from .amax import amax_into
from .block_formats import encode_element, mx_scale, nvfp4_scale
from .launch import on, soft_cast
from .rounding import philox
from .source import Result, Source, source_of, values
from .tiles import ceil_div, int64, magnitude_bits, scale_from_amax

TILE_M, TILE_K = 64, 64  # whole blocks in both directions
WARPS = 8  # 4 spill registers in some formats, with swizzled scales or odd sizes


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
def _quantize(x, data_ptr, scale_inv_ptr, seed_ptr, line, start, count, length, add, scale, F,
              LINES: tl.constexpr, N: tl.constexpr, STREAM: tl.constexpr, SWIZZLED: tl.constexpr,
              SOFT_CAST: tl.constexpr):  # fmt: skip
    """The elements x [LINES, N] from `start` on of `count` lines from `line` on, each of `length`
    elements. x is 0 outside. Returns the amax of each line, as bits."""
    BLOCKS: tl.constexpr = N // F.BLOCK
    lines = line + tl.arange(0, LINES)
    across = ceil_div(length, F.BLOCK)
    x = tl.reshape(x, (LINES, BLOCKS, F.BLOCK))
    amax = tl.max(magnitude_bits(x), axis=2)
    if F.NVFP4:
        stored, factor = nvfp4_scale(amax, scale, seed_ptr is not None, SOFT_CAST)
    else:
        stored, factor = mx_scale(amax, add, F)
    block = start // F.BLOCK + tl.arange(0, BLOCKS)
    inside = (lines < count)[:, None] & (block < across)[None, :]
    at_scale = lines[:, None] * across + block[None, :]
    if SWIZZLED:  # see swizzle in mixprec/ops/_reference/scale_layout.py
        stored = tl.where(inside, stored, tl.zeros_like(stored))
        # All of these are in one tile of 128 lines and 4 blocks, which programs fill with zeros.
        tile = line // 128 * ceil_div(across, 4) + start // F.BLOCK // 4
        row = (line % 128).to(tl.int32) + tl.arange(0, LINES)
        col = (start // F.BLOCK % 4).to(tl.int32) + tl.arange(0, BLOCKS)
        at_scale = tile * 512 + (row % 32 * 16 + row // 32 * 4)[:, None] + col[None, :]
        inside = (row < 128)[:, None] & (block < ceil_div(across, 4) * 4)[None, :]
    tl.store(scale_inv_ptr + at_scale, stored, mask=inside)

    finite = (amax < 0x7F800000)[:, :, None]
    y = tl.reshape(tl.where(finite, x, 0.0) * factor[:, :, None], (LINES, N))
    random = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        random = _random(lines, start, int64(across) * F.BLOCK, seed, STREAM, LINES, N)
    code = encode_element(y, random, F, SOFT_CAST)
    PER_BYTE: tl.constexpr = 2 if F.BITS == 4 else 1
    if F.BITS == 4:  # elements beyond the last one are 0
        low, high = tl.split(tl.reshape(code, (LINES, N // 2, 2)))
        code = low | (high << 4)
    size = ceil_div(length, PER_BYTE)
    at = start // PER_BYTE + tl.arange(0, N // PER_BYTE)
    inside = (lines < count)[:, None] & (at < size)[None, :]
    tl.store(data_ptr + lines[:, None] * size + at[None, :], code, mask=inside)
    return tl.max(amax, axis=1)


@triton.jit
def quantize_mx_kernel(
    source,
    results,  # without transpose no data_t; amax: with NVFP4 that of x, else it may be None
    tensor_scale_inv_ptr,  # NVFP4 only
    seed_ptr,  # None: to nearest
    M,
    K,
    add,  # to the bits of the amax of a block, MX only
    F,  # the Format
    SWIZZLED: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = ceil_div(K, 128) * (128 // TILE_K) if SWIZZLED else ceil_div(K, TILE_K)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    m, k = first_m + tl.arange(0, TILE_M), first_k + tl.arange(0, TILE_K)
    ys = values(source, m[:, None], k[None, :], M, K, False, SOFT_CAST)
    for i in tl.static_range(source.blocks):
        result, scale = results[i], tl.full((), 1.0, tl.float32)
        if F.NVFP4:
            amax = tl.load(result.amax).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, 2688.0, 1.0, 1.0, False)
            if tl.program_id(0) == 0:
                tl.store(tensor_scale_inv_ptr, tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
        line_amax = _quantize(ys[i], result.data, result.scale_inv, seed_ptr, first_m, first_k, M,
                              K, add, scale, F, TILE_M, TILE_K, 0, SWIZZLED,
                              SOFT_CAST)  # fmt: skip
        if not F.NVFP4 and result.amax is not None:
            tl.atomic_max(result.amax, tl.max(line_amax, axis=0), sem="relaxed")
        if result.data_t is not None:
            _quantize(tl.trans(ys[i]), result.data_t, result.scale_inv_t, seed_ptr, first_k,
                      first_m, K, M, add, scale, F, TILE_K, TILE_M, 1, SWIZZLED,
                      SOFT_CAST)  # fmt: skip


def _to_cast(
    source: Source, fmt: str, transpose: bool, swizzled: bool, with_amax: bool
) -> tuple[list[torch.Tensor], Result]:
    """The results of a cast, allocated, and the same as an argument of the kernel."""
    (M, K), shape = source.size(), source.x.shape
    (size, across), (size_t, across_t) = block_formats.sizes(fmt, K), block_formats.sizes(fmt, M)

    def bytes_of(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.uint8, device=source.x.device)

    def scales_of(rows: int, blocks: int) -> torch.Tensor:
        if not swizzled:
            return bytes_of(rows, blocks)
        return bytes_of(triton.cdiv(rows, 128), triton.cdiv(blocks, 4), 32, 16)

    data, scale_inv = bytes_of(*shape[:-1], *(shape[-1:] and (size,))), scales_of(M, across)
    data_t, scale_inv_t = bytes_of(0, 0), bytes_of(0)
    if transpose:
        data_t, scale_inv_t = bytes_of(K, size_t), scales_of(K, across_t)
    nvfp4 = fmt == "nvfp4"
    with_amax = with_amax or nvfp4
    shape_of_amax = () if with_amax else (0,)
    amax = torch.zeros(shape_of_amax, dtype=torch.float32, device=source.x.device)
    tensor_scale_inv = amax.new_ones(() if nvfp4 else (0,))
    result = Result(data, scale_inv=scale_inv, amax=amax.view(torch.int32) if with_amax else None)
    if transpose:
        result = result._replace(data_t=data_t, scale_inv_t=scale_inv_t)
    codes_of = block_formats.DTYPES.get(fmt, torch.uint8)
    scales = torch.float8_e4m3fn if nvfp4 else torch.uint8
    made = [data.view(codes_of), data_t.view(codes_of), scale_inv.view(scales)]
    return [*made, scale_inv_t.view(scales), tensor_scale_inv, amax], result


def quantize_mx_from(
    source: Source,
    fmt: str,
    scale_mode: str,
    transpose: bool,
    seed: torch.Tensor | None,
    *,
    swizzled: bool,
    with_amax: bool,
) -> list[list[torch.Tensor]]:
    """The results of each block of values; one launch for MX, two for NVFP4, which fused ops do
    not have."""
    M, K = source.size()
    made, results = zip(
        *(
            _to_cast(source, fmt, transpose, swizzled, with_amax)
            for _ in range(source.blocks.value)
        ),
        strict=True,
    )
    nvfp4 = fmt == "nvfp4"
    if source.x.numel():
        with on(source.x):
            if nvfp4:
                amax_into(source, made[0][5])
            side = 128 if swizzled else 1  # tiles cover the padding of the scales, too
            tiles = [triton.cdiv(triton.cdiv(n, side) * side, tile)
                     for n, tile in ((M, TILE_M), (K, TILE_K))]  # fmt: skip
            quantize_mx_kernel[(tiles[0] * tiles[1],)](
                source, results, made[0][4] if nvfp4 else None, seed, M, K,
                block_formats.rounding_of_amax(fmt, scale_mode), block_formats.format_of(fmt),
                SWIZZLED=swizzled,
                SOFT_CAST=soft_cast(source.x.device, source.x.dtype, torch.float8_e4m3fn),
                TILE_M=TILE_M, TILE_K=TILE_K, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
    return list(made)


def quantize_mx(
    x: torch.Tensor,
    fmt: str,
    scale_mode: str,
    transpose: bool,
    seed: torch.Tensor | None,
    swizzled: bool,
    with_amax: bool,
) -> tuple[torch.Tensor, ...]:
    """x of any strides."""
    how = {"swizzled": swizzled, "with_amax": with_amax}
    return tuple(quantize_mx_from(source_of(x), fmt, scale_mode, transpose, seed, **how)[0])
