"""The scalar arithmetic of scales: from amax to scale, the loss scale's update, clipping."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import MAX, on
from .tiles import magnitude_bits, ordered_sum, scale_from_amax

BLOCK = 1024
EARLY = 20  # growth on underflow needs only growth_interval / EARLY updates without an overflow


@triton.jit
def scale_from_amax_kernel(scale_ptr, scale_inv_ptr, amax_ptr, n, fmt_max, two_to_minus_margin,
                           POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    amax = tl.load(amax_ptr + offsets, mask=inside, other=1.0)
    previous = tl.load(scale_ptr + offsets, mask=inside, other=1.0)
    scale = scale_from_amax(amax, fmt_max, two_to_minus_margin, previous, POWER_OF_TWO)
    tl.store(scale_ptr + offsets, scale, mask=inside)
    tl.store(scale_inv_ptr + offsets, tl.div_rn(tl.zeros_like(scale) + 1.0, scale), mask=inside)


def scale_from_amax_(args: Any) -> None:
    scale, scale_inv, amax, dtype, margin, power_of_two = args
    if scale.numel() == 0:
        return
    flat = [t.contiguous() for t in (scale, scale_inv, amax)]
    with on(scale):
        scale_from_amax_kernel[(triton.cdiv(scale.numel(), BLOCK),)](
            *flat, scale.numel(), MAX[dtype], 2.0**-margin, POWER_OF_TWO=power_of_two, BLOCK=BLOCK
        )
    for original, copy in zip((scale, scale_inv), flat[:2], strict=True):
        if copy is not original:
            original.copy_(copy)


@triton.jit
def inv_scale_kernel(scale_ptr, out_ptr):
    tl.store(out_ptr, (1.0 / tl.load(scale_ptr).to(tl.float64)).to(tl.float32))


def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(scale)
    with on(scale):
        inv_scale_kernel[(1,)](scale, out)
    return out


@triton.jit(do_not_specialize=["count"])
def clip_coef_kernel(sum_sq_ptr, count, out_ptr, max_norm: tl.float64, BLOCK: tl.constexpr):
    clip = max_norm / (tl.sqrt(ordered_sum(sum_sq_ptr, count, BLOCK)) + 1e-6)
    tl.store(out_ptr, tl.where(clip > 1.0, 1.0, clip).to(tl.float32))


def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    out = sum_sq.new_empty((), dtype=torch.float32)
    with on(sum_sq):
        clip_coef_kernel[(1,)](sum_sq, sum_sq.numel(), out, max_norm, BLOCK=BLOCK)
    return out


@triton.jit(do_not_specialize=["growth_interval", "hysteresis"])
def update_scale_kernel(
    scale_ptr,
    growth_tracker_ptr,
    hysteresis_tracker_ptr,
    counter_ptr,  # int64 [3]: updates with overflow, without, consecutive ones with overflow
    found_inf_ptr,
    underflow_ptr,
    growth_factor: tl.float64,  # products are FP64, rounded once, as in torch
    backoff_factor: tl.float64,
    growth_interval,
    min_scale,
    max_scale,
    hysteresis,
    grow_on_underflow,
    EARLY: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    found = tl.load(found_inf_ptr) != 0.0
    left = tl.load(hysteresis_tracker_ptr) - found.to(tl.int32)
    tracker = tl.where(found, 0, tl.load(growth_tracker_ptr) + 1)
    grows = tracker >= growth_interval
    if underflow_ptr is not None:
        early = tracker.to(tl.int64) * EARLY >= growth_interval
        grows = grows | (early & (tl.load(underflow_ptr) > grow_on_underflow))
    grows = grows & (found == 0)
    backs_off = found & (left <= 0)
    lower = (scale.to(tl.float64) * backoff_factor).to(tl.float32)
    lower = tl.where(lower < min_scale, min_scale, lower)
    lower = tl.where(lower < scale, lower, scale)
    higher = (scale.to(tl.float64) * growth_factor).to(tl.float32)
    higher = tl.where(higher > max_scale, max_scale, higher)
    useful = (magnitude_bits(higher) < 0x7F800000) & (higher > scale)
    higher = tl.where(useful, higher, scale)
    tl.store(scale_ptr, tl.where(backs_off, lower, tl.where(grows, higher, scale)))
    tl.store(growth_tracker_ptr, tl.where(grows, 0, tracker))
    tl.store(hysteresis_tracker_ptr, tl.where(grows, hysteresis, tl.where(left > 0, left, 0)))
    overflow = found.to(tl.int64)
    tl.store(counter_ptr, tl.load(counter_ptr) + overflow)
    tl.store(counter_ptr + 1, tl.load(counter_ptr + 1) + (1 - overflow))
    tl.store(counter_ptr + 2, tl.where(found, tl.load(counter_ptr + 2) + 1, 0))


def update_scale_(args: Any) -> None:
    """The kernel takes the arguments in the schema's order."""
    with on(args.scale):
        update_scale_kernel[(1,)](*args, EARLY=EARLY)
