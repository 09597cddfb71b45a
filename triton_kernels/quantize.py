"""quantize: cast(x * scale), and in the same pass the transpose and amax; the same of values that a
fused op computes."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .amax import amax_into
from .launch import FORMATS, MAX, codes, on, soft_cast
from .quantize_blocks import quantize_blocks
from .quantize_mx import quantize_mx_from
from .source import Result, Source, source_of, values
from .tiles import ceil_div, encode, magnitude_bits, scale_from_amax, store

BLOCK = 4096  # of 8 warps: 4 spill registers in some odd sizes
MX = {torch.float8_e4m3fn: "mxfp8_e4m3", torch.float8_e5m2: "mxfp8_e5m2"}
TILE_M, TILE_K = 64, 64  # 16-byte fp8 stores in both orders: four threads per row of either

Results = tuple[torch.Tensor, ...]


@triton.jit
def scale_of(result, fmt_max, Q: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale: to FP8 from amax if none is given, and a given 0 counts as not given. The first
    program writes its inverse. Every program forms it anew, which costs one load, while a kernel of
    its own would cost a launch."""
    scale = tl.full((), 1.0, tl.float32)
    if Q == "e4m3" or Q == "e5m2":
        amax = tl.load(result.amax).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, fmt_max, 1.0, 1.0, POWER_OF_TWO)
    if result.scale is not None:
        given = tl.load(result.scale)
        # A scale out of range is NaN, which every result then shows.
        checked = tl.where((given >= 2.0**-126) & (given <= 2.0**126), given, float("nan"))
        scale = tl.where(given == 0.0, scale, checked)
    if tl.program_id(0) == 0:
        tl.store(result.scale_inv, tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
    return scale


@triton.jit
def _scales(source, results, fmt_max, Q: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    scales = ()
    for i in tl.static_range(source.blocks):
        scales += (scale_of(results[i], fmt_max, Q, POWER_OF_TWO),)
    return scales


@triton.jit
def raise_amax(result, bits, Q: tl.constexpr):
    """To the largest of these magnitudes, unless it was needed and known before."""
    if result.scale is not None or (Q != "e4m3" and Q != "e5m2"):
        tl.atomic_max(result.amax, tl.max(bits), sem="relaxed")


@triton.jit
def _block(source, results, offsets, n, fmt_max, Q: tl.constexpr, POWER_OF_TWO: tl.constexpr,
           SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    scales = _scales(source, results, fmt_max, Q, POWER_OF_TWO)
    ys = values(source, None, offsets, None, n, FULL, SOFT_CAST)
    for i in tl.static_range(source.blocks):
        store(results[i].data, offsets, encode(ys[i], ys[i] * scales[i], Q, SOFT_CAST), n, FULL)
        raise_amax(results[i], magnitude_bits(ys[i]), Q)


@triton.jit
def quantize_kernel(
    source,
    results,
    n,
    fmt_max,
    Q: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(source, results, offsets, n, fmt_max, Q, POWER_OF_TWO, SOFT_CAST, True)
    else:
        _block(source, results, offsets, n, fmt_max, Q, POWER_OF_TWO, SOFT_CAST, False)


@triton.jit
def quantize_transpose_kernel(
    source,
    results,
    M,
    K,
    fmt_max,
    Q: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = ceil_div(K, TILE_K)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    m, k = first_m + tl.arange(0, TILE_M), first_k + tl.arange(0, TILE_K)
    row, column = m[:, None], k[None, :]
    inside_t = (k[:, None] < K) & (m[None, :] < M)
    scales = _scales(source, results, fmt_max, Q, POWER_OF_TWO)
    ys = values(source, row, column, M, K, False, SOFT_CAST)
    for i in tl.static_range(source.blocks):
        q = encode(ys[i], ys[i] * scales[i], Q, SOFT_CAST)
        tl.store(results[i].data + (row * K + column), q, mask=(row < M) & (column < K))
        tl.store(results[i].data_t + (k[:, None] * M + m[None, :]), tl.trans(q), mask=inside_t)
        raise_amax(results[i], magnitude_bits(ys[i]), Q)


def scale_inv_of_nothing(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Of a tensor without elements, for which no kernel runs."""
    used = torch.ones((), dtype=torch.float32, device=device)
    if scale is not None:
        given = scale.reshape(())
        valid = (given >= 2.0**-126) & (given <= 2.0**126)
        used = torch.where(given == 0, used, torch.where(valid, given, math.nan))
    return used.reciprocal()


def to_cast(
    source: Source, cast: Any, scale: torch.Tensor | None, amax: torch.Tensor | None = None
) -> tuple[Results, Result]:
    """The results of a cast with one scale, allocated, and the same as an argument of a kernel."""
    (M, K), device = source.size(), source.x.device
    data = torch.empty(source.x.shape, dtype=cast.dtype, device=device)
    shape_t = (K, M) if cast.transpose else (0, 0)
    data_t = torch.empty(shape_t, dtype=cast.dtype, device=device)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    amax = torch.zeros((), **fp32) if amax is None else amax
    scale_inv = torch.empty((), **fp32)
    bits = amax.view(torch.int32)
    result = Result(codes(data), codes(data_t), scale, scale_inv, amax=bits)
    return (data, data_t, scale_inv, torch.empty((0,), **fp32), amax), result


def constants(source: Source, cast: Any) -> dict[str, Any]:
    """Of the kernels that cast with one scale."""
    return {
        "fmt_max": MAX[cast.dtype], "Q": FORMATS[cast.dtype],
        "POWER_OF_TWO": cast.power_of_two_scale, "enable_fp_fusion": False,
        "SOFT_CAST": soft_cast(source.x.device, source.x.dtype, cast.dtype),
    }  # fmt: skip


def _quantize_tensor(source: Source, cast: Any, amax: torch.Tensor | None) -> list[Results]:
    """amax: that of the values, if it is known."""
    scales = (cast.scale, None)[: source.blocks.value]
    made, results = zip(*(to_cast(source, cast, scale, amax) for scale in scales), strict=True)
    if source.x.numel() == 0:
        for (_, _, scale_inv, *_), scale in zip(made, scales, strict=True):
            scale_inv.copy_(scale_inv_of_nothing(scale, source.x.device))
        return list(made)
    M, K = source.size()
    options = constants(source, cast) | {"num_warps": 8}
    with on(source.x):
        if cast.dtype.itemsize == 1 and amax is None:
            given = scales[0] if len(scales) == 1 else None
            amax_into(source, *(result[4] for result in made), given=given)
        if cast.transpose:
            quantize_transpose_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)](
                source, results, M, K, **options, TILE_M=TILE_M, TILE_K=TILE_K
            )
        else:
            n = source.x.numel()
            quantize_kernel[(triton.cdiv(n, BLOCK),)](source, results, n, **options, BLOCK=BLOCK)
    return list(made)


def cast_from(source: Source, cast: Any, amax: torch.Tensor | None = None) -> Results:
    """The results of the cast of the values; where there are those of dx and dup, scale is dx's."""
    if cast.granularity == "mx":
        of_mx = quantize_mx_from(
            source, MX[cast.dtype], "rceil", cast.transpose, None, swizzled=False, with_amax=True
        )
        made = [(*results[:4], results[5]) for results in of_mx]
    elif cast.granularity != "tensor":
        made = quantize_blocks(source, cast)
    else:
        made = _quantize_tensor(source, cast, amax)
    return tuple(tensor for results in made for tensor in results)


def quantize(x: torch.Tensor, cast: Any) -> Results:
    return cast_from(source_of(x), cast)
