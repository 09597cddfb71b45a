"""grad_stats_: one read of all gradients that tells whether they are finite and how large."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, is_dense, on, soft_cast
from .tiles import decode, is_nonfinite, load

BLOCK, ROUNDS = 2048, 8  # a program reads ROUNDS blocks and leaves one partial sum
SUM_BLOCK = 1024


@triton.jit
def _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, start, n, G: tl.constexpr,
           SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    sums = tl.zeros((BLOCK,), tl.float64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for i in range(ROUNDS):
        offsets = start + i * BLOCK + tl.arange(0, BLOCK)
        value = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
        if inv_scale_ptr is not None:
            value = value * tl.load(inv_scale_ptr).to(value.dtype)
        wide = value.to(tl.float64)
        sums += wide * wide
        # Times Inf or NaN nothing is finite: the product shows what the gradient was.
        bad |= is_nonfinite(value).to(tl.int32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(sums, axis=0))
    if tl.max(bad, axis=0) != 0:
        tl.store(found_inf_ptr, 1.0)


# A partial sum may lie at any multiple of 8 bytes: one kernel for all of them.
@triton.jit(do_not_specialize_on_alignment=["partial_ptr"])
def grad_stats_kernel(
    grad_ptr,
    inv_scale_ptr,
    found_inf_ptr,
    partial_ptr,  # fp64, one per program
    n,
    G: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    if start + BLOCK * ROUNDS <= n:
        _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, start, n, G, SOFT_CAST, BLOCK,
               ROUNDS, True)  # fmt: skip
    else:
        _chunk(grad_ptr, inv_scale_ptr, found_inf_ptr, partial_ptr, start, n, G, SOFT_CAST, BLOCK,
               ROUNDS, False)  # fmt: skip


@triton.jit
def sum_kernel(partial_ptr, count, sum_ptr, BLOCK: tl.constexpr):
    """One program, so that the order of the additions is a matter of `count` alone."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        sums += tl.load(partial_ptr + offsets, mask=offsets < count, other=0.0)
    tl.store(sum_ptr, tl.sum(sums, axis=0))


def grad_stats_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    sum_sq: torch.Tensor,
) -> None:
    programs = [triton.cdiv(grad.numel(), BLOCK * ROUNDS) for grad in grads]
    partial = torch.empty(sum(programs), dtype=torch.float64, device=sum_sq.device)
    first = 0
    with on(sum_sq):
        for grad, count in zip(grads, programs, strict=True):
            if count == 0:
                continue
            grad_stats_kernel[(count,)](
                codes(grad if is_dense(grad) else grad.contiguous()),
                inv_scale,
                found_inf,
                partial[first:],
                grad.numel(),
                G=FORMATS[grad.dtype],
                SOFT_CAST=soft_cast(grad.device, grad.dtype),
                BLOCK=BLOCK,
                ROUNDS=ROUNDS,
            )
            first += count
        sum_kernel[(1,)](partial, partial.numel(), sum_sq, BLOCK=SUM_BLOCK)
