"""quantize: cast(x * scale), and in the same pass the transpose and amax; the same of values that a
fused op computes, those of act_quantize and act_backward among them."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .amax import amax_into
from .launch import on
from .quantize_blocks import quantize_blocks
from .quantize_mx import quantize_mx_from
from .source import Source, source_of, target_of, to_cast, values
from .tiles import ceil_div, encode, magnitude_bits, scale_from_amax, store

BLOCK = 4096  # of 8 warps: 4 spill registers in some odd sizes
MX = {torch.float8_e4m3fn: "mxfp8_e4m3", torch.float8_e5m2: "mxfp8_e5m2"}
TILE_M, TILE_K = 64, 64  # 16-byte fp8 stores in both orders: four threads per row of either

Results = tuple[torch.Tensor, ...]


@triton.jit
def scale_of(result, to):
    """The scale: to FP8 from amax if none is given, and a given 0 counts as not given. The first
    program writes its inverse. Every program forms it anew, which costs one load, while a kernel of
    its own would cost a launch."""
    scale = tl.full((), 1.0, tl.float32)
    if to.Q == "e4m3" or to.Q == "e5m2":
        amax = tl.load(result.amax).to(tl.float32, bitcast=True)
        scale = scale_from_amax(amax, to.fmt_max, 1.0, 1.0, to.POWER_OF_TWO)
    if result.scale is not None:
        given = tl.load(result.scale)
        # A scale out of range is NaN, which every result then shows.
        checked = tl.where((given >= 2.0**-126) & (given <= 2.0**126), given, float("nan"))
        scale = tl.where(given == 0.0, scale, checked)
    if tl.program_id(0) == 0:
        tl.store(result.scale_inv, tl.div_rn(tl.zeros_like(scale) + 1.0, scale))
    return scale


@triton.jit
def _scales(source, results, to):
    scales = ()
    for i in tl.static_range(source.blocks):
        scales += (scale_of(results[i], to),)
    return scales


@triton.jit
def raise_amax(result, bits, to):
    """To the largest of these magnitudes, unless it was needed and known before."""
    if result.record is not None:
        tl.atomic_max(result.record, tl.max(bits), sem="relaxed")
    elif result.scale is not None or (to.Q != "e4m3" and to.Q != "e5m2"):
        tl.atomic_max(result.amax, tl.max(bits), sem="relaxed")


@triton.jit
def quantize_kernel(source, results, to, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    full = start + BLOCK <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            scales = _scales(source, results, to)
            ys = values(source, None, offsets, None, n, FULL, to.SOFT_CAST)
            for i in tl.static_range(source.blocks):
                q = encode(ys[i], ys[i] * scales[i], to.Q, to.SOFT_CAST)
                store(results[i].data, offsets, q, n, FULL)
                raise_amax(results[i], magnitude_bits(ys[i]), to)


@triton.jit
def quantize_transpose_kernel(
    source, results, to, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    tiles_k = ceil_div(K, TILE_K)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * TILE_K
    m, k = first_m + tl.arange(0, TILE_M), first_k + tl.arange(0, TILE_K)
    row, column = m[:, None], k[None, :]
    inside_t = (k[:, None] < K) & (m[None, :] < M)
    scales = _scales(source, results, to)
    ys = values(source, row, column, M, K, False, to.SOFT_CAST)
    for i in tl.static_range(source.blocks):
        q = encode(ys[i], ys[i] * scales[i], to.Q, to.SOFT_CAST)
        tl.store(results[i].data + (row * K + column), q, mask=(row < M) & (column < K))
        tl.store(results[i].data_t + (k[:, None] * M + m[None, :]), tl.trans(q), mask=inside_t)
        raise_amax(results[i], magnitude_bits(ys[i]), to)


def scale_inv_of_nothing(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Of a tensor without elements, for which no kernel runs."""
    used = torch.ones((), dtype=torch.float32, device=device)
    if scale is not None:
        given = scale.reshape(())
        valid = (given >= 2.0**-126) & (given <= 2.0**126)
        used = torch.where(given == 0, used, torch.where(valid, given, math.nan))
    return used.reciprocal()


def _quantize_tensor(source: Source, cast: Any, amax: torch.Tensor | None) -> list[Results]:
    """amax: that of the values, if it is known."""
    scales = (cast.scale, None)[: source.blocks.value]
    records = (cast.record, None)
    each = zip(scales, records, strict=False)
    made, results = zip(*(to_cast(source, cast, *given, amax) for given in each), strict=True)
    if source.x.numel() == 0:
        for (_, _, scale_inv, *_), scale in zip(made, scales, strict=True):
            scale_inv.copy_(scale_inv_of_nothing(scale, source.x.device))
        if cast.record is not None:
            cast.record.clamp_min_(0.0)
        return list(made)
    M, K = source.size()
    to, options = target_of(source, cast), {"num_warps": 8, "enable_fp_fusion": False}
    with on(source.x):
        if cast.dtype.itemsize == 1 and amax is None:
            given = scales[0] if len(scales) == 1 else None
            amax_into(source, *(result.amax for result in results), given=given)
        if cast.transpose:
            quantize_transpose_kernel[(triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)](
                source, results, to, M, K, **options, TILE_M=TILE_M, TILE_K=TILE_K
            )
        else:
            n = source.x.numel()
            quantize_kernel[(triton.cdiv(n, BLOCK),)](
                source, results, to, n, **options, BLOCK=BLOCK
            )
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


def act_quantize(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    return cast_from(source_of(x, up=up, act=kind), cast)


def act_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    results = cast_from(source_of(x, g=g, up=up, act=kind), cast)
    if up is not None:
        return results
    nothing = [x.new_empty(shape, dtype=cast.dtype) for shape in ((0,), (0, 0))]
    return *results, *nothing, *(x.new_empty((0,), dtype=torch.float32) for _ in range(3))
