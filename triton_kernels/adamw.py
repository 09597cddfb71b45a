"""adamw_: unscale, clip, AdamW and the write-back to low precision, in one pass over the state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, in_one_order, on, soft_cast
from .tiles import decode, encode, load, store

BLOCK = 1024
COLUMNS = 8  # of the table of constants, one row per param, fp64
STEPS_BLOCK = 128
# Every operation of the update is rounded on its own: no fused multiply-add.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _power(beta, step):
    """beta^step in FP64 by binary exponentiation: products alone, the same on every backend."""
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
    table_ptr,  # fp64 [count, COLUMNS]
    count,
    lr: tl.float64,  # a number without this word is passed as fp32
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
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
    count_of = step.to(tl.int64)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    row = table_ptr + i * COLUMNS
    tl.store(row, one * lr * weight_decay, mask=inside)
    tl.store(row + 1, one - beta1, mask=inside)
    tl.store(row + 2, one * beta2, mask=inside)
    tl.store(row + 3, one - beta2, mask=inside)
    tl.store(row + 4, one * eps, mask=inside)
    tl.store(row + 5, one * lr / (one - _power(beta1, count_of)), mask=inside)
    tl.store(row + 6, one / tl.sqrt(one - _power(beta2, count_of)), mask=inside)


@triton.jit
def _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, table_ptr, inv_scale_ptr,
           clip_ptr, offsets, n, P: tl.constexpr, G: tl.constexpr, MAXIMIZE: tl.constexpr,
           SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    m = load(exp_avg_ptr, offsets, n, FULL)
    v = load(exp_avg_sq_ptr, offsets, n, FULL)
    g = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
    if master_ptr is not None:
        p = load(master_ptr, offsets, n, FULL)
    else:
        p = decode(load(param_ptr, offsets, n, FULL), P, SOFT_CAST)
    # Each constant is rounded once, to the width of the arithmetic.
    decay = tl.load(table_ptr).to(p.dtype)
    one_minus_beta1 = tl.load(table_ptr + 1).to(p.dtype)
    beta2 = tl.load(table_ptr + 2).to(p.dtype)
    one_minus_beta2 = tl.load(table_ptr + 3).to(p.dtype)
    eps = tl.load(table_ptr + 4).to(p.dtype)
    step_size = tl.load(table_ptr + 5).to(p.dtype)
    inv_sqrt_bc2 = tl.load(table_ptr + 6).to(p.dtype)
    if inv_scale_ptr is not None:
        g = g * tl.load(inv_scale_ptr).to(p.dtype)
    if clip_ptr is not None:
        g = g * tl.load(clip_ptr).to(p.dtype)
    if MAXIMIZE:
        g = -g
    p = p - p * decay
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    if p.dtype == tl.float64:
        update = m / (tl.sqrt(v) * inv_sqrt_bc2 + eps)
    else:
        update = tl.div_rn(m, tl.sqrt_rn(v) * inv_sqrt_bc2 + eps)
    p = p - update * step_size
    store(exp_avg_ptr, offsets, m, n, FULL)
    store(exp_avg_sq_ptr, offsets, v, n, FULL)
    if master_ptr is not None:
        store(master_ptr, offsets, p, n, FULL)
    store(param_ptr, offsets, encode(p, p, P, SOFT_CAST), n, FULL)


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    master_ptr,  # None: the param is the truth
    table_ptr,  # fp64 [COLUMNS], this param's row
    inv_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    n,
    P: tl.constexpr,
    G: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    proceed = True
    if found_inf_ptr is not None:
        proceed = tl.load(found_inf_ptr) == 0.0
    if proceed:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        if start + BLOCK <= n:
            _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, offsets, n, P, G, MAXIMIZE, SOFT_CAST,
                   True)  # fmt: skip
        else:
            _block(param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, table_ptr,
                   inv_scale_ptr, clip_ptr, offsets, n, P, G, MAXIMIZE, SOFT_CAST,
                   False)  # fmt: skip


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
    steps: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    if not params:
        return
    # All steps in one launch, before any update: a program of an update that advanced the step
    # itself would race with the others that read it.
    counts = torch.stack([step.reshape(()) for step in steps])
    table = counts.new_empty((len(params), COLUMNS), dtype=torch.float64)
    with on(counts):
        adamw_constants_kernel[(triton.cdiv(len(params), STEPS_BLOCK),)](
            counts, found_inf, table, len(params), lr, beta1, beta2, eps, weight_decay,
            COLUMNS=COLUMNS, BLOCK=STEPS_BLOCK, **OPTIONS,
        )  # fmt: skip
        torch._foreach_copy_(
            steps, [c.view_as(s) for c, s in zip(counts.unbind(), steps, strict=True)]
        )
        for i, param in enumerate(params):
            if param.numel() == 0:
                continue
            written = [param, exp_avgs[i], exp_avg_sqs[i], *masters[i : i + 1]]
            read = grads[i]
            flat = written
            if not in_one_order([*written, read]):
                flat, read = [t.contiguous() for t in written], read.contiguous()
            p, m, v, *master = flat
            adamw_kernel[(triton.cdiv(param.numel(), BLOCK),)](
                codes(p), codes(read), m, v, master[0] if master else None, table[i],
                inv_scale, clip, found_inf, param.numel(), P=FORMATS[p.dtype],
                G=FORMATS[read.dtype], MAXIMIZE=maximize,
                SOFT_CAST=soft_cast(p.device, p.dtype, read.dtype), BLOCK=BLOCK, **OPTIONS,
            )  # fmt: skip
            for original, copy in zip(written, flat, strict=True):
                if copy is not original:
                    original.copy_(copy)
