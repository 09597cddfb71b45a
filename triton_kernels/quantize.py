"""quantize: cast(x * scale), and in the same pass the transpose and amax."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .amax import amax, amax_into
from .launch import FORMATS, MAX, codes, on, soft_cast
from .quantize_blocks import quantize_blocks
from .quantize_mx import quantize_mx
from .tiles import ceil_div, decode, encode, load, magnitude_bits, scale_from_amax, store

BLOCK = 4096
MX = {torch.float8_e4m3fn: "mxfp8_e4m3", torch.float8_e5m2: "mxfp8_e5m2"}
TILE_M, TILE_K = 64, 64  # 16-byte fp8 stores in both orders: four threads per row of either


@triton.jit
def _scale(scale_ptr, amax_ptr, scale_inv_ptr, fmt_max, SCALE: tl.constexpr,
           FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr):  # fmt: skip
    """The scale; a given scale of 0 counts as not given. The first program writes its inverse.
    Every program forms it anew, which costs one load, while a kernel of its own would cost a
    launch."""
    scale = tl.full((), 1.0, tl.float32)
    if FP8:
        amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, fmt_max, 1.0, 1.0, POWER_OF_TWO)
    if SCALE == "given":
        given = tl.load(scale_ptr)
        # A scale out of range is NaN, which every result then shows.
        checked = tl.where((given >= 2.0**-126) & (given <= 2.0**126), given, float("nan"))
        scale = tl.where(given == 0.0, scale, checked)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
    return scale


@triton.jit
def _block(x_ptr, scale, q_ptr, amax_ptr, offsets, n, X: tl.constexpr, Q: tl.constexpr,
           SCALE: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    x = decode(load(x_ptr, offsets, n, FULL), X, SOFT_CAST)
    store(q_ptr, offsets, encode(x, x * scale, Q, SOFT_CAST), n, FULL)
    if SCALE != "from amax":
        tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x), axis=0), sem="relaxed")


@triton.jit
def quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,  # read if SCALE is "given"
    amax_ptr,  # int32 bits: the amax of x if no scale is given, else initially 0 and updated
    scale_inv_ptr,
    n,
    fmt_max,
    X: tl.constexpr,
    Q: tl.constexpr,
    SCALE: tl.constexpr,  # "given", "from amax" or "one"
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    FP8: tl.constexpr = Q == "e4m3" or Q == "e5m2"
    scale = _scale(scale_ptr, amax_ptr, scale_inv_ptr, fmt_max, SCALE, FP8, POWER_OF_TWO)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(x_ptr, scale, q_ptr, amax_ptr, offsets, n, X, Q, SCALE, SOFT_CAST, True)
    else:
        _block(x_ptr, scale, q_ptr, amax_ptr, offsets, n, X, Q, SCALE, SOFT_CAST, False)


@triton.jit
def quantize_transpose_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K]
    q_t_ptr,  # [K, M]
    scale_ptr,
    amax_ptr,
    scale_inv_ptr,
    M,
    K,
    fmt_max,
    X: tl.constexpr,
    Q: tl.constexpr,
    SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    FP8: tl.constexpr = Q == "e4m3" or Q == "e5m2"
    scale = _scale(scale_ptr, amax_ptr, scale_inv_ptr, fmt_max, SCALE, FP8, POWER_OF_TWO)
    tiles_k = ceil_div(K, TILE_K)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    m, k = first_m + tl.arange(0, TILE_M), first_k + tl.arange(0, TILE_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    inside_t = (k < K)[:, None] & (m < M)[None, :]
    offsets = m[:, None] * K + k[None, :]
    x = decode(tl.load(x_ptr + offsets, mask=inside, other=0), X, SOFT_CAST)
    q = encode(x, x * scale, Q, SOFT_CAST)
    tl.store(q_ptr + offsets, q, mask=inside)
    tl.store(q_t_ptr + k[:, None] * M + m[None, :], tl.trans(q), mask=inside_t)
    if SCALE != "from amax":
        tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x)), sem="relaxed")


def quantize(
    x: torch.Tensor, cast: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, scale, transpose, granularity, power_of_two_scale = cast
    x = x.contiguous()
    if granularity != "tensor":
        return quantize_blocks(x, dtype, transpose, granularity, power_of_two_scale)
    is_fp8 = dtype.itemsize == 1
    K = x.shape[-1] if transpose else 0
    M = x.shape[:-1].numel() if transpose else 0
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    data_t = torch.empty((K, M), dtype=dtype, device=x.device)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    scale_inv_t = torch.empty((0,), dtype=torch.float32, device=x.device)
    source = "given" if scale is not None else "from amax" if is_fp8 else "one"
    if x.numel() == 0:
        used = torch.ones((), dtype=torch.float32, device=x.device)
        if scale is not None:
            given = scale.reshape(())
            valid = (given >= 2.0**-126) & (given <= 2.0**126)
            used = torch.where(given == 0, used, torch.where(valid, given, math.nan))
        return data, data_t, used.reciprocal(), scale_inv_t, amax
    scale_inv = torch.empty_like(amax)
    constants = {
        "X": FORMATS[x.dtype],
        "Q": FORMATS[dtype],
        "SCALE": source,
        "POWER_OF_TWO": power_of_two_scale,
        "SOFT_CAST": soft_cast(x.device, x.dtype, dtype),
    }
    scalars = scale, amax.view(torch.int32), scale_inv
    with on(x):
        if is_fp8:
            amax_into(x, amax, scale)
        if transpose:
            quantize_transpose_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)](
                codes(x), codes(data), codes(data_t), *scalars, M, K, MAX[dtype],
                **constants, TILE_M=TILE_M, TILE_K=TILE_K,
            )  # fmt: skip
        else:
            quantize_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                codes(x), codes(data), *scalars, x.numel(), MAX[dtype], **constants, BLOCK=BLOCK
            )
    return data, data_t, scale_inv, scale_inv_t, amax


def quantize_values(
    y: torch.Tensor, cast: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize of the fp32 values of a fused op, which may also stay as they are or become MX."""
    if cast.granularity == "mx":
        results = quantize_mx(y, MX[cast.dtype], "rceil", cast.transpose, None, False, True)
        return *results[:4], results[5]
    if cast.dtype != torch.float32:
        return quantize(y, cast)
    return y, y.new_empty((0, 0)), y.new_ones(()), y.new_empty((0,)), amax(y)
