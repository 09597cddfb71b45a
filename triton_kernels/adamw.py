"""adamw_: unscale, clip, Adam and the write-back to low precision, in one pass over the state."""

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
    SECOND_STATE,
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
def _power(beta, step):
    """beta^step in FP64 by binary exponentiation: only products, the same on every backend."""
    power = tl.full(step.shape, 1.0, tl.float64)
    factor = tl.full(step.shape, beta, tl.float64)
    for _ in range(25):  # step is an fp32 count, exact up to 2^24
        power = tl.where((step & 1) == 1, power * factor, power)
        factor = factor * factor
        step = step >> 1
    return power


@triton.jit
def adamw_constants_kernel(
    step_ptr,  # fp32 [count], advanced here unless found_inf != 0
    found_inf_ptr,
    lr_ptr,  # None: lr
    table_ptr,  # fp64 [count, COLUMNS]
    count,
    lr: tl.float64,  # without the annotation a number is passed as fp32
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    DECOUPLED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    step = advance(step_ptr, found_inf_ptr, table_ptr, i, count, COLUMNS)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    rate = one * learning_rate(lr_ptr, lr)
    decay = one * weight_decay
    if DECOUPLED:
        decay = rate * weight_decay
    row = table_ptr + i * COLUMNS
    tl.store(row, decay, mask=inside)
    tl.store(row + 1, one - beta1, mask=inside)
    tl.store(row + 2, one * beta2, mask=inside)
    tl.store(row + 3, one - beta2, mask=inside)
    tl.store(row + 4, one * eps, mask=inside)
    tl.store(row + 5, rate / (one - _power(beta1, step)), mask=inside)
    tl.store(row + 6, one / tl.sqrt(one - _power(beta2, step)), mask=inside)


@triton.jit
def _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_scale_ptr,
           exp_avg_sq_scale_ptr, master_ptr, table_ptr, inv_scale_ptr, clip_ptr, max_value, key,
           start, n, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
           REMAINDER: tl.constexpr, STOCHASTIC: tl.constexpr, DECOUPLED: tl.constexpr,
           MAXIMIZE: tl.constexpr, SOFT_CAST: tl.constexpr, BLOCK: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    m = load_state(exp_avg_ptr, exp_avg_scale_ptr, start, n, FIRST_STATE, M, SOFT_CAST, FULL,
                   BLOCK)  # fmt: skip
    v = load_state(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, start, n, SECOND_STATE, V, SOFT_CAST, FULL,
                   BLOCK)  # fmt: skip
    g = gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G, MAXIMIZE, SOFT_CAST,
                 FULL)  # fmt: skip
    p = load_master(param_ptr, master_ptr, offsets, n, P, REMAINDER, SOFT_CAST, FULL)
    # Each constant is rounded once, to the width of the arithmetic.
    decay = tl.load(table_ptr).to(p.dtype)
    one_minus_beta1 = tl.load(table_ptr + 1).to(p.dtype)
    beta2 = tl.load(table_ptr + 2).to(p.dtype)
    one_minus_beta2 = tl.load(table_ptr + 3).to(p.dtype)
    eps = tl.load(table_ptr + 4).to(p.dtype)
    step_size = tl.load(table_ptr + 5).to(p.dtype)
    inv_sqrt_bc2 = tl.load(table_ptr + 6).to(p.dtype)
    if DECOUPLED:  # if it is 0, an infinite p stays infinite
        p = tl.where(decay != 0.0, p - p * decay, p)
    else:
        g = tl.where(decay != 0.0, g + p * decay, g)
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    if p.dtype == tl.float64:
        update = m / (tl.sqrt(v) * inv_sqrt_bc2 + eps)
    else:
        update = tl.div_rn(m, tl.sqrt_rn(v) * inv_sqrt_bc2 + eps)
    p = p - update * step_size
    write_state(exp_avg_ptr, exp_avg_scale_ptr, m, start, n, key, FIRST_STATE, M, SOFT_CAST, FULL,
                BLOCK)  # fmt: skip
    write_state(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, v, start, n, key, SECOND_STATE, V, SOFT_CAST,
                FULL, BLOCK)  # fmt: skip
    write_param(param_ptr, master_ptr, p, start, n, key, P, REMAINDER, STOCHASTIC, SOFT_CAST, FULL,
                BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    exp_avg_scale_ptr,  # None but for states in 8 bits
    exp_avg_sq_scale_ptr,
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
    V: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DECOUPLED: tl.constexpr,
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
            _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_scale_ptr,
                   exp_avg_sq_scale_ptr, master_ptr, table_ptr, inv_scale_ptr, clip_ptr, max_value,
                   key, start, n, P, G, M, V, REMAINDER, STOCHASTIC, DECOUPLED, MAXIMIZE, SOFT_CAST,
                   BLOCK, True)  # fmt: skip
        else:
            _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, exp_avg_scale_ptr,
                   exp_avg_sq_scale_ptr, master_ptr, table_ptr, inv_scale_ptr, clip_ptr, max_value,
                   key, start, n, P, G, M, V, REMAINDER, STOCHASTIC, DECOUPLED, MAXIMIZE, SOFT_CAST,
                   BLOCK, False)  # fmt: skip


def adamw_(args: Any) -> None:
    params, steps = args.params, args.steps
    if not params:
        return
    # All step counts are advanced in one launch before any update: a program of an update that did
    # so would race with the others that read the count.
    table = steps.new_empty((len(params), COLUMNS), dtype=torch.float64)
    with on(steps):
        adamw_constants_kernel[(triton.cdiv(len(params), STEPS_BLOCK),)](
            steps, args.found_inf, args.lr_tensor, table, len(params), args.lr, args.beta1,
            args.beta2, args.eps, args.weight_decay, DECOUPLED=args.decoupled_weight_decay,
            COLUMNS=COLUMNS, BLOCK=STEPS_BLOCK, **OPTIONS,
        )  # fmt: skip
        for i, tensors, constants in each_update(args, {"M": args.exp_avgs, "V": args.exp_avg_sqs}):
            adamw_kernel[programs(params[i])](
                *tensors, table[i], args.inv_scale, args.clip, args.found_inf, args.max_value,
                args.seed, args.indices[i] if args.indices else 0, params[i].numel(),
                DECOUPLED=args.decoupled_weight_decay, MAXIMIZE=args.maximize, **constants,
                **OPTIONS,
            )  # fmt: skip
