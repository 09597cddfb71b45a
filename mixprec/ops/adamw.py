"""adamw_: unscale, clip, Adam and the write-back to low precision, in one pass over the state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import example_inputs, optimizer_update, rounding
from ._dispatch.op import Op

__all__ = ["adamw_", "adamw_op", "adamw_reference_"]

_STEP_BITS = 25  # step is an fp32 count, exact up to 2^24


def _bias_corrections(steps: torch.Tensor, beta: float) -> torch.Tensor:
    """1 - beta^step in FP64, by binary exponentiation: products only, the same on every backend."""
    left = steps.long()
    power = torch.ones_like(steps, dtype=torch.float64)
    factor = beta
    for _ in range(_STEP_BITS):
        power = torch.where((left & 1) == 1, power * factor, power)
        factor *= factor
        left = left >> 1
    return 1.0 - power


def _sqrt(v: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root. torch.sqrt on the CPU is off by one unit for some inputs:
    for FP32 it is taken in FP64, where that unit is rounded away; for FP64 by the math library."""
    if v.dtype == torch.float32:
        return v.double().sqrt().float()
    if v.device.type == "cpu":
        return v.clone().apply_(lambda x: math.sqrt(x) if x >= 0 else math.nan)
    return v.sqrt()


def adamw_reference_(args: Any) -> None:
    update = optimizer_update.Update(args)
    step_sizes = update.lr / _bias_corrections(update.counts, args.beta1)
    inv_sqrt_bc2 = 1.0 / _sqrt(_bias_corrections(update.counts, args.beta2))
    for i, (m, v) in enumerate(zip(args.exp_avgs, args.exp_avg_sqs, strict=True)):
        real, g, p = update.real(i), update.gradient(i), update.master(i)
        # Without decay an infinite p is unchanged: 0 * Inf would be NaN.
        if args.decoupled_weight_decay:
            decay = (update.lr * args.weight_decay).to(real)
            p = torch.where(decay != 0, p - p * decay, p)
        elif (decay_of_grad := optimizer_update.rounded(args.weight_decay, real)) != 0:
            g = g + p * decay_of_grad
        old_m = update.read_state(i, m, rounding.FIRST_STATE)
        old_v = update.read_state(i, v, rounding.SECOND_STATE)
        new_m = old_m + (g - old_m) * optimizer_update.rounded(1 - args.beta1, real)
        new_v = old_v * optimizer_update.rounded(args.beta2, real)
        new_v = new_v + (g * g) * optimizer_update.rounded(1 - args.beta2, real)
        denom = _sqrt(new_v) * inv_sqrt_bc2[i].to(real)
        denom = denom + optimizer_update.rounded(args.eps, real)
        p = p - (new_m / denom) * step_sizes[i].to(real)
        update.write_state(i, m, new_m, rounding.FIRST_STATE)
        update.write_state(i, v, new_v, rounding.SECOND_STATE)
        update.write_param(i, p)


def _check(args: Any) -> None:
    optimizer_update.check("adamw_", args, states=("exp_avgs", "exp_avg_sqs"))


adamw_op = Op(
    "adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor(e!) steps, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled_weight_decay, " + optimizer_update.SHARED_SCHEMA,
    reference=adamw_reference_,
    check=_check,
    examples=example_inputs.adamw,
    triton="adamw",
)


def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    state_scales: Sequence[torch.Tensor] = (),
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
    max_value: float = math.inf,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] = (),
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One Adam step over lists of tensors, in place; no change if found_inf != 0.

        step += 1;  bc = 1 - beta^step
        g = grad * inv_scale * clip, bounded by +-max_value     (negated if maximize)
        p = p - lr * weight_decay * p  unless that is 0         p: master, or param without one
        m = m + (g - m) * (1 - beta1)                           m: exp_avg
        v = v * beta2 + g * g * (1 - beta2)                     v: exp_avg_sq
        p = p - (lr / bc1) * (m / (sqrt(v) / sqrt(bc2) + eps))
        master = p;  param = p rounded to nearest even

    Without decoupled_weight_decay the second line of p is g = g + weight_decay * p instead (Adam
    with L2 regularization).

    params: fp32, bf16, fp16 or fp64, any shapes. grads: one per param, its shape, fp32, bf16 or
    fp16 (fp64 for fp64 params). exp_avgs, exp_avg_sqs: fp32 (fp64 for fp64 params), bf16, or uint8
    codes, of the param's shape. state_scales: empty without uint8; else the scales of exp_avgs,
    then of exp_avg_sqs: fp32 [ceil(numel / 256)] for each, or any tensor beside one that is not
    uint8. masters: one tensor per param, or an empty list; fp32, or, for bf16 params, int16: the
    bits that the param lacks, such that it rounds to the param, to nearest, ties away from zero.
    steps: fp32 [params], counts. inv_scale, clip, found_inf: fp32, one element. lr: a
    number or an fp32 or fp64 tensor of one element. All on one device.

    bf16 and uint8 moments, and with stochastic_rounding bf16 params without a master, are rounded
    stochastically, to a neighbour with probability proportional to its nearness: Philox4x32-10
    keyed by seed, counted by element, step and indices[i] (one number per param), so calls are
    reproducible. The arithmetic is FP32 (FP64 for fp64 params) in exactly this order: all backends
    give the same bits. Sources: Adam (Kingma, Ba, 2015), Decoupled Weight Decay Regularization
    (Loshchilov, Hutter, 2019).
    """
    optimizer_update.prepare("adamw_", params, steps)
    if not params:
        return
    adamw_op(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        masters,
        steps,
        0.0 if isinstance(lr, torch.Tensor) else lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        state_scales,
        maximize,
        max_value,
        stochastic_rounding,
        seed,
        indices,
        lr if isinstance(lr, torch.Tensor) else None,
        inv_scale,
        clip,
        found_inf,
    )
