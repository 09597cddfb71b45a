"""muon_direction_: unscale, clip and momentum of Muon, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import on
from .step import (
    COLUMNS,
    FIRST_STATE,
    OPTIONS,
    STEPS_BLOCK,
    UNSPECIALIZED,
    advance,
    each_update,
    gradient,
    load_state,
    programs,
    random_key,
    write_param,
    write_state,
)


@triton.jit
def muon_direction_constants_kernel(
    step_ptr,  # fp32 [count], advanced here unless found_inf != 0
    found_inf_ptr,
    table_ptr,  # fp64 [count, COLUMNS]
    count,
    momentum: tl.float64,  # without the annotation a number is passed as fp32
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    advance(step_ptr, found_inf_ptr, table_ptr, i, count, COLUMNS)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    tl.store(table_ptr + i * COLUMNS, one - momentum, mask=inside)


@triton.jit
def _block(param_ptr, grad_ptr, buffer_ptr, scale_ptr, master_ptr, table_ptr, inv_scale_ptr,
           clip_ptr, max_value, key, start, n, P: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
           REMAINDER: tl.constexpr, STOCHASTIC: tl.constexpr, NESTEROV: tl.constexpr,
           MAXIMIZE: tl.constexpr, SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    g = gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G, MAXIMIZE, SOFT_CAST,
                 FULL)  # fmt: skip
    weight = tl.load(table_ptr).to(g.dtype)  # rounded once, to the width of the arithmetic
    b = load_state(buffer_ptr, scale_ptr, start, n, FIRST_STATE, B, SOFT_CAST, FULL, BLOCK)
    b = b + (g - b) * weight
    p = b + (g - b) * weight if NESTEROV else b
    write_state(buffer_ptr, scale_ptr, b, start, n, key, FIRST_STATE, B, SOFT_CAST, FULL, BLOCK)
    write_param(param_ptr, master_ptr, p, start, n, key, P, REMAINDER, STOCHASTIC, SOFT_CAST, FULL,
                BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def muon_direction_kernel(
    param_ptr,  # receives the direction
    grad_ptr,
    buffer_ptr,
    scale_ptr,  # of the state in 8 bits, else None
    master_ptr,  # None: there is none
    table_ptr,  # fp64 [COLUMNS], this param's row
    inv_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    max_value: tl.float64,
    seed: tl.int64,
    index,
    n,
    P: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    proceed = True
    if found_inf_ptr is not None:
        proceed = tl.load(found_inf_ptr) == 0.0
    if proceed:
        key = random_key(table_ptr, seed, index)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        if start + BLOCK <= n:
            _block(param_ptr, grad_ptr, buffer_ptr, scale_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, max_value, key, start, n, P, G, B, REMAINDER,
                   STOCHASTIC, NESTEROV, MAXIMIZE, SOFT_CAST, BLOCK, True)  # fmt: skip
        else:
            _block(param_ptr, grad_ptr, buffer_ptr, scale_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, max_value, key, start, n, P, G, B, REMAINDER,
                   STOCHASTIC, NESTEROV, MAXIMIZE, SOFT_CAST, BLOCK, False)  # fmt: skip


def muon_direction_(args: Any) -> None:
    params, steps = args.params, args.steps
    if not params:
        return
    table = steps.new_empty((len(params), COLUMNS), dtype=torch.float64)
    with on(steps):
        muon_direction_constants_kernel[(triton.cdiv(len(params), STEPS_BLOCK),)](
            steps, args.found_inf, table, len(params), args.momentum, COLUMNS=COLUMNS,
            BLOCK=STEPS_BLOCK, **OPTIONS,
        )  # fmt: skip
        for i, tensors, constants in each_update(args, {"B": args.momentum_buffers}):
            muon_direction_kernel[programs(params[i])](
                *tensors, table[i], args.inv_scale, args.clip, args.found_inf, args.max_value,
                args.seed, args.indices[i] if args.indices else 0, params[i].numel(),
                NESTEROV=args.nesterov, MAXIMIZE=args.maximize, **constants, **OPTIONS,
            )  # fmt: skip
