"""Shared by the optimizer updates: counting steps, the gradient, reading and writing.

The formulas are those of csrc/math/step.h. One launch computes the constants of all params; then
one launch per param updates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, in_one_order, soft_cast
from .philox import random16
from .rounding import join_master, split_master, stochastic_bf16
from .state8 import decode_codes, encode_codes
from .tiles import decode, encode, load, store

BLOCK = 1024  # elements per program of an update
COLUMNS = 8  # of the table of constants: fp64, one row per param
STEP = tl.constexpr(7)  # the column of the step
STEPS_BLOCK = 128
_FORMATS = {**FORMATS, torch.uint8: "codes"}  # of states
# Every operation is rounded separately: no fused multiply-add.
OPTIONS = {"enable_fp_fusion": False}
# One kernel for all seeds and params: Triton would specialise it for 1 and multiples of 16.
UNSPECIALIZED = ("seed", "index")
# The array of a param that the random bits are for.
PARAM = tl.constexpr(0)
FIRST_STATE = tl.constexpr(1)
SECOND_STATE = tl.constexpr(2)


@triton.jit
def advance(step_ptr, found_inf_ptr, table_ptr, i, count, COLUMNS: tl.constexpr):
    """Count the steps of params i, unless skipped, and return the counts (int64)."""
    step = tl.load(step_ptr + i, mask=i < count, other=1.0)
    if found_inf_ptr is not None:
        step = tl.where(tl.load(found_inf_ptr) != 0.0, step, step + 1.0)
    else:
        step = step + 1.0
    tl.store(step_ptr + i, step, mask=i < count)
    tl.store(table_ptr + i * COLUMNS + STEP, step.to(tl.float64), mask=i < count)
    return step.to(tl.int64)


@triton.jit
def learning_rate(lr_ptr, lr):
    if lr_ptr is not None:
        return tl.load(lr_ptr).to(tl.float64)
    else:
        return lr


@triton.jit
def random_key(table_ptr, seed, index):
    """The inputs of the random bits of a param, besides the element and the array."""
    return seed, tl.load(table_ptr + STEP).to(tl.int64).to(tl.uint32), index


@triton.jit
def gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G: tl.constexpr,
             MAXIMIZE: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """grad * inv_scale * clip, bounded by +-max_value, negated to maximize."""
    g = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
    if inv_scale_ptr is not None:
        g = g * tl.load(inv_scale_ptr).to(g.dtype)
    if clip_ptr is not None:
        g = g * tl.load(clip_ptr).to(g.dtype)
    limit = tl.full(g.shape, max_value, g.dtype)
    g = tl.where(g > limit, limit, g)  # NaN stays NaN
    g = tl.where(g < limit * -1.0, limit * -1.0, g)
    if MAXIMIZE:
        g = g * -1.0  # -g is 0 - g in Triton 3.6 and 3.7: another zero
    return g


@triton.jit
def load_master(param_ptr, master_ptr, offsets, n, P: tl.constexpr, REMAINDER: tl.constexpr,
          SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """The value to update: the master, or the param if it has none."""
    if master_ptr is None:
        return decode(load(param_ptr, offsets, n, FULL), P, SOFT_CAST)
    elif REMAINDER:
        return join_master(load(param_ptr, offsets, n, FULL), load(master_ptr, offsets, n, FULL))
    else:
        return load(master_ptr, offsets, n, FULL)


@triton.jit
def load_state(state_ptr, scale_ptr, start, n, STREAM: tl.constexpr, FORMAT: tl.constexpr,
               SOFT_CAST: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    stored = load(state_ptr, start + tl.arange(0, BLOCK), n, FULL)
    if FORMAT == "codes":
        return decode_codes(stored, scale_ptr, start, n, STREAM == FIRST_STATE, BLOCK)
    else:
        return decode(stored, FORMAT, SOFT_CAST)


@triton.jit
def write_state(state_ptr, scale_ptr, value, start, n, key, STREAM: tl.constexpr,
                FORMAT: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """States in 16 and 8 bits always use stochastic rounding."""
    offsets = start + tl.arange(0, BLOCK)
    if FORMAT == "codes":
        value = encode_codes(value, scale_ptr, start, n, key, STREAM == FIRST_STATE, STREAM, BLOCK)
    elif FORMAT == "bf16":
        value = stochastic_bf16(value, random16(start, key, STREAM, BLOCK), SOFT_CAST)
    store(state_ptr, offsets, value, n, FULL)


@triton.jit
def write_param(param_ptr, master_ptr, p, start, n, key, P: tl.constexpr, REMAINDER: tl.constexpr,
                STOCHASTIC: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    if REMAINDER:
        low, remainder = split_master(p, SOFT_CAST)
        store(master_ptr, offsets, remainder, n, FULL)
    elif STOCHASTIC:
        low = stochastic_bf16(p, random16(start, key, PARAM, BLOCK), SOFT_CAST)
    else:
        low = encode(p, p, P, SOFT_CAST)
        if master_ptr is not None:
            store(master_ptr, offsets, p, n, FULL)
    store(param_ptr, offsets, low, n, FULL)


def each_update(
    args: Any, states: dict[str, Sequence[torch.Tensor]]
) -> Iterator[tuple[int, list[torch.Tensor | None], dict[str, Any]]]:
    """For each param that is not empty: its index in the lists, the tensors for the kernel (param,
    grad, states, their scales, master or None) and the constants that follow from dtypes.

    states: lists, possibly empty, by the name of the constexpr that receives their format. The
    kernel launched for a param may work on copies, which are written back before the next param.
    """
    params, grads, masters = args.params, args.grads, args.masters
    for i, param in enumerate(params):
        if param.numel() == 0:
            continue
        own = [state[i] if state else None for state in (*states.values(), masters)]
        *of_states, master = own
        formats = {
            constant: None if state is None else _FORMATS[state.dtype]
            for constant, state in zip(states, of_states, strict=True)
        }
        scales = [
            args.state_scales[k * len(params) + i] if form == "codes" else None
            for k, form in enumerate(formats.values())
        ]
        stochastic = args.stochastic_rounding and param.dtype == torch.bfloat16 and master is None
        tensors = [t for t in (param, grads[i], *own) if t is not None]
        # With random bits the order of elements must be row-major.
        if stochastic or {"bf16", "codes"} & set(formats.values()):
            as_they_are = all(t.is_contiguous() for t in tensors)
        else:
            as_they_are = in_one_order(tensors)
        flat = tensors if as_they_are else [t.contiguous() for t in tensors]
        rest = map(codes, flat)
        pointers = [None if t is None else next(rest) for t in (param, grads[i], *own)]
        pointers[-1:-1] = scales
        yield (
            i,
            pointers,
            {
                **formats,
                "P": FORMATS[param.dtype],
                "G": FORMATS[grads[i].dtype],
                "REMAINDER": master is not None and master.dtype == torch.int16,
                "STOCHASTIC": stochastic,
                "SOFT_CAST": soft_cast(param.device, param.dtype),
                "BLOCK": BLOCK,
            },
        )
        for original, copy in zip(tensors, flat, strict=True):
            if copy is not original and original is not grads[i]:
                original.copy_(copy)


def programs(param: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(param.numel(), BLOCK),)
