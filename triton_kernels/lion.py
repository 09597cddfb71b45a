"""lion_: unscale, clip, Lion and the write-back to low precision, in one pass."""

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
    learning_rate,
    load_master,
    load_state,
    programs,
    random_key,
    write_param,
    write_state,
)


@triton.jit
def lion_constants_kernel(
    step_ptr,  # fp32 [count], advanced here unless found_inf != 0
    found_inf_ptr,
    lr_ptr,  # None: lr
    table_ptr,  # fp64 [count, COLUMNS]
    count,
    lr: tl.float64,  # without the annotation a number is passed as fp32
    beta1: tl.float64,
    beta2: tl.float64,
    weight_decay: tl.float64,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    advance(step_ptr, found_inf_ptr, table_ptr, i, count, COLUMNS)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    row = table_ptr + i * COLUMNS
    rate = one * learning_rate(lr_ptr, lr)
    tl.store(row, rate * weight_decay, mask=inside)
    tl.store(row + 1, one - beta1, mask=inside)
    tl.store(row + 2, one - beta2, mask=inside)
    tl.store(row + 3, rate, mask=inside)


@triton.jit
def _block(param_ptr, grad_ptr, exp_avg_ptr, scale_ptr, master_ptr, table_ptr, inv_scale_ptr,
           clip_ptr, max_value, key, start, n, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
           REMAINDER: tl.constexpr, STOCHASTIC: tl.constexpr, MAXIMIZE: tl.constexpr,
           SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    g = gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G, MAXIMIZE, SOFT_CAST,
                 FULL)  # fmt: skip
    p = load_master(param_ptr, master_ptr, offsets, n, P, REMAINDER, SOFT_CAST, FULL)
    # Each constant is rounded once, to the width of the arithmetic.
    decay = tl.load(table_ptr).to(p.dtype)
    p = tl.where(decay != 0.0, p - p * decay, p)  # where it is 0, an infinite p stays
    m = load_state(exp_avg_ptr, scale_ptr, start, n, FIRST_STATE, M, SOFT_CAST, FULL, BLOCK)
    c = m + (g - m) * tl.load(table_ptr + 1).to(p.dtype)
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))  # NaN stays
    sign = tl.where(c == 0.0, 0.0, sign)  # not -0: a p of -0 stays
    m = m + (g - m) * tl.load(table_ptr + 2).to(p.dtype)
    p = p - sign * tl.load(table_ptr + 3).to(p.dtype)
    write_state(exp_avg_ptr, scale_ptr, m, start, n, key, FIRST_STATE, M, SOFT_CAST, FULL, BLOCK)
    write_param(param_ptr, master_ptr, p, start, n, key, P, REMAINDER, STOCHASTIC, SOFT_CAST, FULL,
                BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def lion_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    scale_ptr,  # of the state in 8 bits, else None
    master_ptr,  # None: the param holds the weights
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
    M: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
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
            _block(param_ptr, grad_ptr, exp_avg_ptr, scale_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, max_value, key, start, n, P, G, M, REMAINDER,
                   STOCHASTIC, MAXIMIZE, SOFT_CAST, BLOCK, True)  # fmt: skip
        else:
            _block(param_ptr, grad_ptr, exp_avg_ptr, scale_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, max_value, key, start, n, P, G, M, REMAINDER,
                   STOCHASTIC, MAXIMIZE, SOFT_CAST, BLOCK, False)  # fmt: skip


def lion_(args: Any) -> None:
    params, steps = args.params, args.steps
    if not params:
        return
    table = steps.new_empty((len(params), COLUMNS), dtype=torch.float64)
    with on(steps):
        lion_constants_kernel[(triton.cdiv(len(params), STEPS_BLOCK),)](
            steps, args.found_inf, args.lr_tensor, table, len(params), args.lr, args.beta1,
            args.beta2, args.weight_decay, COLUMNS=COLUMNS, BLOCK=STEPS_BLOCK, **OPTIONS,
        )  # fmt: skip
        for i, tensors, constants in each_update(args, {"M": args.exp_avgs}):
            lion_kernel[programs(params[i])](
                *tensors, table[i], args.inv_scale, args.clip, args.found_inf, args.max_value,
                args.seed, args.indices[i] if args.indices else 0, params[i].numel(),
                MAXIMIZE=args.maximize, **constants, **OPTIONS,
            )  # fmt: skip
