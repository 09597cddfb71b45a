"""grad_stats_: one read of all gradients that tells whether they are finite and how large."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .grad_kind import add_counts, kinds
from .launch import FORMATS, codes, is_dense, on, soft_cast
from .tiles import decode, is_nonfinite, load, ordered_sum

BLOCK, ROUNDS = 2048, 8  # a program reads ROUNDS blocks and leaves one partial sum
SUM_BLOCK = 1024


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
