"""rotary: a program rotates the heads of x and k at one position, and copies those of v."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, on, soft_cast
from .tiles import decode, encode, int64

HEADS, PAIRS, WARPS = 16, 32, 2  # a tile of 512 pairs of features: 16 bytes a thread in 16 bits


@triton.jit
def _load(ptr, pair, D, mask, INTERLEAVED: tl.constexpr):
    """The two features of each pair in rows of D: [rows, pairs]."""
    if INTERLEAVED:
        both = 2 * pair[:, :, None] + tl.arange(0, 2)[None, None, :]
        return tl.split(tl.load(ptr[:, :, None] + both, mask=mask[:, :, None], other=0))
    else:
        first = tl.load(ptr + pair, mask=mask, other=0)
        return first, tl.load(ptr + (pair + D // 2), mask=mask, other=0)


@triton.jit
def _store(ptr, pair, D, y1, y2, mask, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = 2 * pair[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(ptr[:, :, None] + both, tl.join(y1, y2), mask=mask[:, :, None])
    else:
        tl.store(ptr + pair, y1, mask=mask)
        tl.store(ptr + (pair + D // 2), y2, mask=mask)


@triton.jit
def _factors(ptr, pair, D, FULL: tl.constexpr, INTERLEAVED: tl.constexpr):
    if FULL:
        return _load(ptr + 0 * pair, pair, D, pair < D // 2, INTERLEAVED)
    else:
        both = tl.load(ptr + pair, mask=pair < D // 2, other=0)
        return both, both


@triton.jit
def _rotate(x_ptr, strides, heads, y_ptr, by_head, pair, factors, D, X: tl.constexpr,
            INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, SOFT_CAST: tl.constexpr,
            HEADS: tl.constexpr):  # fmt: skip
    """x_ptr, y_ptr: [heads, D]; factors: cos and sin of both features; None copies x."""
    for start in range(0, heads, HEADS):
        head = int64(start) + tl.arange(0, HEADS)[:, None]
        mask = (head < heads) & (pair < D // 2)
        x1, x2 = _load(x_ptr + head * strides[1], pair, D, mask, INTERLEAVED)
        if factors is not None:
            cos1, cos2, sin1, sin2 = factors
            x1, x2 = decode(x1, X, SOFT_CAST), decode(x2, X, SOFT_CAST)
            if INVERSE:
                y1 = x1 * cos1 + x2 * sin2
                y2 = x2 * cos2 - x1 * sin1
            else:
                y1 = x1 * cos1 - x2 * sin1
                y2 = x2 * cos2 + x1 * sin2
            x1, x2 = encode(y1, y1, X, SOFT_CAST), encode(y2, y2, X, SOFT_CAST)
        _store(y_ptr + head * by_head, pair, D, x1, x2, mask, INTERLEAVED)


@triton.jit(do_not_specialize=["heads", "T"])
def rotary_kernel(
    x_ptr,  # [B, heads, T, D], as k and v, which may be None
    k_ptr,
    v_ptr,
    cos_ptr,  # [B or 1, T, D/2], or FULL: D
    sin_ptr,
    y_ptr,  # [B, all heads, T, D]; x, k and v may lie there, each in its place
    heads,  # of x, k and v, 0 for None
    x_strides,  # of B, heads and T
    k_strides,
    v_strides,
    y_strides,
    cos_strides,  # of B and T
    sin_strides,
    T,
    D,
    X: tl.constexpr,
    FULL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    cos_ptr += b * cos_strides[0] + t * cos_strides[1]
    sin_ptr += b * sin_strides[0] + t * sin_strides[1]
    y_ptr += b * y_strides[0] + t * y_strides[2]
    x_ptr += b * x_strides[0] + t * x_strides[2]
    if k_ptr is not None:
        k_ptr += b * k_strides[0] + t * k_strides[2]
    if v_ptr is not None:
        v_ptr += b * v_strides[0] + t * v_strides[2]
    for first in range(0, D // 2, PAIRS):
        pair = int64(first) + tl.arange(0, PAIRS)[None, :]
        cos1, cos2 = _factors(cos_ptr, pair, D, FULL, INTERLEAVED)
        sin1, sin2 = _factors(sin_ptr, pair, D, FULL, INTERLEAVED)
        factors = (cos1, cos2, sin1, sin2)
        by_head = y_strides[1]
        _rotate(x_ptr, x_strides, heads[0], y_ptr, by_head, pair, factors, D, X, INTERLEAVED,
                INVERSE, SOFT_CAST, HEADS)  # fmt: skip
        y = y_ptr + heads[0] * by_head
        if k_ptr is not None:
            _rotate(k_ptr, k_strides, heads[1], y, by_head, pair, factors, D, X, INTERLEAVED,
                    INVERSE, SOFT_CAST, HEADS)  # fmt: skip
        if v_ptr is not None:
            _rotate(v_ptr, v_strides, heads[2], y + heads[1] * by_head, by_head, pair, None, D, X,
                    INTERLEAVED, INVERSE, SOFT_CAST, HEADS)  # fmt: skip


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotary(args: Any) -> torch.Tensor:
    parts = [None if part is None else _dense_rows(part) for part in args[:3]]
    heads, x = sum(part.shape[1] for part in parts if part is not None), args.x
    B, _, T, D = x.shape
    y = torch.empty((B, T, heads, D), dtype=x.dtype, device=x.device).transpose(1, 2)
    _launch(parts, args, y)
    return y


def rotary_(args: Any) -> None:
    _launch([args.x, None, None], args, args.x)


def _launch(parts: list[torch.Tensor | None], args: Any, y: torch.Tensor) -> None:
    x, (B, _, T, D) = args.x, args.x.shape
    heads = tuple(0 if part is None else part.shape[1] for part in parts)
    tables = [_dense_rows(table) for table in (args.cos, args.sin)]
    strides = [(0, 0, 0) if part is None else part.stride()[:3] for part in parts]
    strides.append(y.stride()[:3])
    strides += [(0 if t.dim() == 2 or len(t) == 1 else t.stride(0), t.stride(-2)) for t in tables]
    if y.numel():
        with on(x):
            rotary_kernel[(B * T,)](
                *(None if part is None else codes(part) for part in parts), *tables, codes(y),
                heads, *strides, T, D, X=FORMATS[x.dtype], FULL=args.cos.shape[-1] == D,
                INTERLEAVED=args.interleaved, INVERSE=args.inverse,
                SOFT_CAST=soft_cast(x.device, x.dtype), HEADS=HEADS, PAIRS=PAIRS, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
