"""adamw_, sgd_, lion_ and muon_direction_: one pass over a param, its gradient and its state.

One launch counts the steps of all params and computes their constants; then one launch per param
updates it, by the formula of step_rules.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, in_one_order, on, soft_cast
from .rounding import (
    ELEMENTS,
    block_random,
    decode_codes,
    encode_codes,
    join_master,
    random16,
    split_master,
    stochastic_24,
    stochastic_bf16,
)
from .step_rules import COLUMNS, FLAGS, LR, SETTING, STEP, derive, formula
from .tiles import decode, encode, load, store

BLOCK = 1024  # elements per program of an update
STEPS_BLOCK = 128
_FORMATS = {**FORMATS, torch.uint8: "codes"}  # of states
_REMAINDERS = {torch.int16: 16, torch.int8: 8}  # bits; 0: of a master, or none
# Every operation is rounded separately: no fused multiply-add.
OPTIONS = {"enable_fp_fusion": False}
# One kernel for all seeds and params: Triton would specialise it for 1 and multiples of 16.
UNSPECIALIZED = ("seed", "index")
# The array of a param that the random bits are for.
PARAM = tl.constexpr(0)
FIRST_STATE = tl.constexpr(1)
SECOND_STATE = tl.constexpr(2)


@triton.jit(do_not_specialize=["count"])
def step_constants_kernel(
    step_ptr,  # fp32 [count], advanced here unless found_inf != 0
    found_inf_ptr,
    lr_ptr,  # None: lr
    table_ptr,  # fp64 [count, COLUMNS]
    count,
    lr: tl.float64,  # without the annotation a number is passed as fp32
    setting0: tl.float64,
    setting1: tl.float64,
    setting2: tl.float64,
    setting3: tl.float64,
    RULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    step = tl.load(step_ptr + i, mask=inside, other=1.0)
    if found_inf_ptr is not None:
        step = tl.where(tl.load(found_inf_ptr) != 0.0, step, step + 1.0)
    else:
        step = step + 1.0
    tl.store(step_ptr + i, step, mask=inside)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    rate = one * lr
    if lr_ptr is not None:
        rate = one * tl.load(lr_ptr).to(tl.float64)
    row = table_ptr + i * COLUMNS
    tl.store(row + STEP, step.to(tl.float64), mask=inside)
    tl.store(row + LR, rate, mask=inside)
    tl.store(row + SETTING, one * setting0, mask=inside)
    tl.store(row + SETTING + 1, one * setting1, mask=inside)
    tl.store(row + SETTING + 2, one * setting2, mask=inside)
    tl.store(row + SETTING + 3, one * setting3, mask=inside)
    derive(row, inside, step.to(tl.int64), rate, setting0, setting1, RULE)


@triton.jit
def _gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G: tl.constexpr,
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
def _load_master(param_ptr, master_ptr, offsets, n, P: tl.constexpr, REMAINDER: tl.constexpr,
                 SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """The value to update: the master, or the param if it has none."""
    if master_ptr is None:
        return decode(load(param_ptr, offsets, n, FULL), P, SOFT_CAST)
    elif REMAINDER != 0:
        return join_master(load(param_ptr, offsets, n, FULL), load(master_ptr, offsets, n, FULL))
    else:
        return load(master_ptr, offsets, n, FULL)


@triton.jit
def _load_state(state_ptr, scale_ptr, start, n, STREAM: tl.constexpr, FORMAT: tl.constexpr,
                SOFT_CAST: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    stored = load(state_ptr, start + tl.arange(0, BLOCK), n, FULL)
    if FORMAT == "codes":
        return decode_codes(stored, scale_ptr, start, n, STREAM == FIRST_STATE, BLOCK)
    else:
        return decode(stored, FORMAT, SOFT_CAST)


@triton.jit
def _write_state(state_ptr, scale_ptr, value, start, n, key, STREAM: tl.constexpr,
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
def _write_param(param_ptr, master_ptr, p, start, n, key, P: tl.constexpr, REMAINDER: tl.constexpr,
                 STOCHASTIC: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    if REMAINDER == 8:
        random = block_random(start, key, PARAM, BLOCK // ELEMENTS)
        p = stochastic_24(p, tl.reshape(random, (BLOCK,)).to(tl.uint32))
        low, remainder = split_master(p, SOFT_CAST)
        store(master_ptr, offsets, (remainder >> 8).to(tl.uint8), n, FULL)
    elif REMAINDER == 16:
        low, remainder = split_master(p, SOFT_CAST)
        store(master_ptr, offsets, remainder, n, FULL)
    elif STOCHASTIC:
        low = stochastic_bf16(p, random16(start, key, PARAM, BLOCK), SOFT_CAST)
    else:
        low = encode(p, p, P, SOFT_CAST)
        if master_ptr is not None:
            store(master_ptr, offsets, p, n, FULL)
    store(param_ptr, offsets, low, n, FULL)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def step_kernel(
    param_ptr,
    grad_ptr,
    first_ptr,  # the states; None: without
    second_ptr,
    first_scale_ptr,  # None but for states in 8 bits
    second_scale_ptr,
    master_ptr,  # None: the param holds the weights
    row,  # fp64 [COLUMNS], this param's
    inv_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    max_value: tl.float64,
    seed: tl.int64,
    index,
    n,
    RULE: tl.constexpr,
    FLAG: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if found_inf_ptr is not None:  # noqa: SIM102  (Triton's `and` loads from None, too)
        if tl.load(found_inf_ptr) != 0.0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    full = start + BLOCK <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            g = _gradient(grad_ptr, inv_scale_ptr, clip_ptr, max_value, offsets, n, G, MAXIMIZE,
                          SOFT_CAST, FULL)  # fmt: skip
            p = g  # which the direction of Muon does not read
            if RULE != "muon_direction":
                p = _load_master(param_ptr, master_ptr, offsets, n, P, REMAINDER, SOFT_CAST, FULL)
            first = g
            second = g
            if first_ptr is not None:
                first = _load_state(first_ptr, first_scale_ptr, start, n, FIRST_STATE, FIRST,
                                    SOFT_CAST, FULL, BLOCK)  # fmt: skip
            if second_ptr is not None:
                second = _load_state(second_ptr, second_scale_ptr, start, n, SECOND_STATE, SECOND,
                                     SOFT_CAST, FULL, BLOCK)  # fmt: skip
            p, first, second = formula(p, g, first, second, row, RULE, FLAG, first_ptr is not None)
            step = tl.load(row + STEP).to(tl.int64).to(tl.uint32)
            key = (seed, step, index)  # of the random bits
            if first_ptr is not None:
                _write_state(first_ptr, first_scale_ptr, first, start, n, key, FIRST_STATE, FIRST,
                             SOFT_CAST, FULL, BLOCK)  # fmt: skip
            if second_ptr is not None:
                _write_state(second_ptr, second_scale_ptr, second, start, n, key, SECOND_STATE,
                             SECOND, SOFT_CAST, FULL, BLOCK)  # fmt: skip
            _write_param(param_ptr, master_ptr, p, start, n, key, P, REMAINDER, STOCHASTIC,
                         SOFT_CAST, FULL, BLOCK)  # fmt: skip


def _update(rule: str, args: Any) -> None:
    params, steps = args.params, args.steps
    if not params:
        return
    flag, numbers = FLAGS[rule], [float(x) for x in args.settings]
    constants = {"RULE": rule, **OPTIONS}
    # All step counts are advanced in one launch before any update: a program of an update that did
    # so would race with the others that read the count.
    table = steps.new_empty((len(params), COLUMNS), dtype=torch.float64)
    with on(steps):
        step_constants_kernel[(triton.cdiv(len(params), STEPS_BLOCK),)](
            steps, args.found_inf, args.lr_tensor, table, len(params), args.lr,
            *[*numbers, 0.0, 0.0, 0.0, 0.0][:4], COLUMNS=COLUMNS, BLOCK=STEPS_BLOCK, **constants,
        )  # fmt: skip
        constants |= {"FLAG": flag is not None and numbers[flag] != 0, "MAXIMIZE": args.maximize}
        for i, param in enumerate(params):
            if param.numel() > 0:
                _update_param(args, i, table[i], constants)


def _update_param(args: Any, i: int, row: torch.Tensor, constants: dict[str, Any]) -> None:
    """One launch; it may work on copies, which are written back."""
    param, grad, count = args.params[i], args.grads[i], len(args.params)
    own = [*args.states[i::count], None, None][:2]
    scales = [*args.state_scales[i::count], None, None][:2]
    formats = [None if state is None else _FORMATS[state.dtype] for state in own]
    master = args.masters[i] if args.masters else None
    stochastic = args.stochastic_rounding and param.dtype == torch.bfloat16 and master is None
    given = [param, grad, *own, master]
    tensors = [t for t in given if t is not None]
    # With random bits the order of elements must be row-major.
    bits = _REMAINDERS.get(master.dtype, 0) if master is not None else 0
    if stochastic or bits == 8 or {"bf16", "codes"} & set(formats):
        as_they_are = all(t.is_contiguous() for t in tensors)
    else:
        as_they_are = in_one_order(tensors)
    flat = tensors if as_they_are else [t.contiguous() for t in tensors]
    rest = map(codes, flat)
    *arrays, master_array = [None if t is None else next(rest) for t in given]
    step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
        *arrays, *[s if f == "codes" else None for s, f in zip(scales, formats, strict=True)],
        master_array, row, args.inv_scale, args.clip, args.found_inf, args.max_value, args.seed,
        args.indices[i] if args.indices else 0, param.numel(), P=FORMATS[param.dtype],
        G=FORMATS[grad.dtype], FIRST=formats[0], SECOND=formats[1],
        REMAINDER=bits, STOCHASTIC=stochastic,
        SOFT_CAST=soft_cast(param.device, param.dtype), BLOCK=BLOCK, **constants,
    )  # fmt: skip
    for original, copy in zip(tensors, flat, strict=True):
        if copy is not original and original is not grad:
            original.copy_(copy)


adamw_ = partial(_update, "adamw")
sgd_ = partial(_update, "sgd")
lion_ = partial(_update, "lion")
muon_direction_ = partial(_update, "muon_direction")
