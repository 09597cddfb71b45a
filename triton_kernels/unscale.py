"""unscale_ and grad_stats_: one pass over each gradient, which divides it by the loss scale or
leaves it as it is, and tells whether it is finite, how large, and of which kinds its elements are.

Kinds, Inf, NaN, zero and subnormal, are those of csrc/math/unscale.h, judged by the bits of fp32
(fp64 for fp64): they order as the magnitudes do, with Inf above all numbers and NaN above Inf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, is_dense, on, soft_cast
from .tiles import decode, encode, is_nonfinite, load, magnitude_bits, ordered_sum, store

UNSCALE_BLOCK = 4096
BLOCK, ROUNDS = 2048, 8  # a program of grad_stats_ reads ROUNDS blocks, leaves one partial sum
SUM_BLOCK = 1024


@triton.jit
def kinds(raw, unscaled, offsets, n, G: tl.constexpr, FULL: tl.constexpr):
    """One element's counts in the four bytes of an uint32, to be added up to 255 times.

    From the lowest: Inf and NaN, before or after unscaling; zero and subnormal in the format G,
    before. Elements beyond n are not counted.
    """
    if G == "fp64":
        INF: tl.constexpr = 0x7FF0000000000000
        MIN_NORMAL: tl.constexpr = 0x0010000000000000
        before = raw.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        after = unscaled.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        INF: tl.constexpr = 0x7F800000
        if G == "fp16":
            MIN_NORMAL: tl.constexpr = 0x38800000
        else:
            MIN_NORMAL: tl.constexpr = 0x00800000
        before = magnitude_bits(raw)
        after = magnitude_bits(unscaled)
    larger = tl.where(before > after, before, after)
    kind = tl.where(larger == INF, 1, 0) + tl.where(larger > INF, 1 << 8, 0)
    kind += tl.where(before == 0, 1 << 16, 0)
    kind += tl.where((before > 0) & (before < MIN_NORMAL), 1 << 24, 0)
    if not FULL:
        kind = tl.where(offsets < n, kind, 0)
    return kind.to(tl.uint32, bitcast=True)


@triton.jit
def add_counts(counts_ptr, sums):
    """counts_ptr[0:4] += the four bytes of sums, added over its elements. Integers: the order in
    which the programs get here does not matter. Most have nothing to add but zeros."""
    for k in tl.static_range(4):
        count = tl.sum(((sums >> (8 * k)) & 0xFF).to(tl.int32), axis=0).to(tl.int64)
        tl.atomic_add(counts_ptr + k, count, mask=count != 0, sem="relaxed")


@triton.jit
def unscale_kernel(
    grad_ptr,
    inv_scale_ptr,
    found_inf_ptr,
    counts_ptr,  # int64 [4], initially 0; None: nothing is counted
    n,
    G: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inv_scale = tl.load(inv_scale_ptr)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    full = start + BLOCK <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            raw = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
            y = raw * inv_scale.to(raw.dtype)
            rounded = encode(y, y, G, SOFT_CAST)
            store(grad_ptr, offsets, rounded, n, FULL)
            # Products with Inf and NaN are never finite, so this also detects them in the gradient.
            unscaled = decode(rounded, G, SOFT_CAST)
            if tl.max(is_nonfinite(unscaled).to(tl.int32), axis=0) != 0:
                tl.store(found_inf_ptr, 1.0)
            if counts_ptr is not None:
                add_counts(counts_ptr, kinds(raw, unscaled, offsets, n, G, FULL))


def unscale_(args: Any) -> None:
    grads, inv_scale, found_inf, counts = args
    if counts is not None:
        counts.zero_()
    with on(found_inf):
        for i, grad in enumerate(grads):
            if grad.numel() == 0:
                continue
            flat = grad if is_dense(grad) else grad.contiguous()
            unscale_kernel[(triton.cdiv(grad.numel(), UNSCALE_BLOCK),)](
                codes(flat),
                inv_scale,
                found_inf,
                None if counts is None else counts[i],
                grad.numel(),
                G=FORMATS[grad.dtype],
                SOFT_CAST=soft_cast(grad.device, grad.dtype),
                BLOCK=UNSCALE_BLOCK,
            )
            if flat is not grad:
                grad.copy_(flat)


@triton.jit
def _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, counts_ptr, start, n,
           G: tl.constexpr, SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    sums = tl.zeros((BLOCK,), tl.float64)
    seen = tl.zeros((BLOCK,), tl.uint32)  # kinds, or 1 for Inf and NaN
    for i in range(ROUNDS):
        offsets = start + i * BLOCK + tl.arange(0, BLOCK)
        raw = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
        value = raw
        if inv_scale_ptr is not None:
            value = value * tl.load(inv_scale_ptr).to(value.dtype)
            if not FULL:  # behind the end, 0 times Inf is no NaN of the gradient
                value = tl.where(offsets < n, value, 0.0).to(raw.dtype)
        wide = value.to(tl.float64)
        sums += wide * wide
        # Times Inf or NaN nothing is finite: the product shows what the gradient was.
        if counts_ptr is not None:
            seen += kinds(raw, value, offsets, n, G, FULL)
        else:
            seen |= is_nonfinite(value).to(tl.uint32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(sums, axis=0))
    if tl.max(seen & 0xFFFF, axis=0) != 0:
        tl.store(found_inf_ptr, 1.0)
    if counts_ptr is not None:
        add_counts(counts_ptr, seen)


# A partial sum may be at any multiple of 8 bytes: do not specialise on its alignment.
@triton.jit(do_not_specialize_on_alignment=["partial_ptr"])
def grad_stats_kernel(
    grad_ptr,
    inv_scale_ptr,
    found_inf_ptr,
    partial_ptr,  # fp64, one per program
    counts_ptr,  # int64 [4], 0 before; None: nothing is counted
    n,
    G: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    if start + BLOCK * ROUNDS <= n:
        _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, counts_ptr, start, n, G,
               SOFT_CAST, BLOCK, ROUNDS, True)  # fmt: skip
    else:
        _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, counts_ptr, start, n, G,
               SOFT_CAST, BLOCK, ROUNDS, False)  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["partial_ptr", "sum_ptr"])
def sum_kernel(partial_ptr, count, sum_ptr, BLOCK: tl.constexpr):
    tl.store(sum_ptr, ordered_sum(partial_ptr, count, BLOCK))


def grad_stats_(args: Any) -> None:
    grads, inv_scale, found_inf, sum_sq, counts = args
    programs = [triton.cdiv(grad.numel(), BLOCK * ROUNDS) for grad in grads]
    partial = torch.empty(max([0, *programs]), dtype=torch.float64, device=sum_sq.device)
    sum_sq.zero_()
    if counts is not None:
        counts.zero_()
    with on(sum_sq):
        for i, (grad, count) in enumerate(zip(grads, programs, strict=True)):
            if count == 0:
                continue
            total = sum_sq[i:]
            grad_stats_kernel[(count,)](
                codes(grad if is_dense(grad) else grad.contiguous()),
                inv_scale,
                found_inf,
                total if count == 1 else partial,  # the next gradient's come after they are added
                None if counts is None else counts[i],
                grad.numel(),
                G=FORMATS[grad.dtype],
                SOFT_CAST=soft_cast(grad.device, grad.dtype),
                BLOCK=BLOCK,
                ROUNDS=ROUNDS,
            )
            if count > 1:
                sum_kernel[(1,)](partial, count, total, BLOCK=SUM_BLOCK)
