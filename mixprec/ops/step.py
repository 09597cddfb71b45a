"""adamw_, lion_, sgd_, muon_direction_: unscale, clip, the step of an optimizer and the write-back
to low precision, in one pass over the state."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._dispatch.optimizer_update import (
    Step,
    Tensors,
    Updated,
    UpdateOp,
    rounded,
)

_STEP_BITS = 25  # step is an fp32 count, exact up to 2^24


def _bias_correction(step: torch.Tensor, beta: float) -> torch.Tensor:
    """1 - beta^step in FP64, by binary exponentiation: products only, the same on every backend."""
    left = step.long()
    power = torch.ones_like(step, dtype=torch.float64)
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


def _decayed(p: torch.Tensor, lr: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """p - p * lr * weight_decay. Without decay an infinite p is unchanged: 0 * Inf would be NaN."""
    decay = (lr * weight_decay).to(p.dtype)
    return torch.where(decay != 0, p - p * decay, p)


def _adamw(p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step) -> Updated:
    lr, count, (beta1, beta2, eps, weight_decay, decoupled_weight_decay) = step
    (m, v), real = states, p.dtype
    if decoupled_weight_decay:
        p = _decayed(p, lr, weight_decay)
    elif (decay_of_grad := rounded(weight_decay, real)) != 0:
        g = g + p * decay_of_grad
    m = m + (g - m) * rounded(1 - beta1, real)
    v = v * rounded(beta2, real) + (g * g) * rounded(1 - beta2, real)
    inv_sqrt_bc2 = 1.0 / _sqrt(_bias_correction(count, beta2))
    denom = _sqrt(v) * inv_sqrt_bc2.to(real) + rounded(eps, real)
    return p - (m / denom) * (lr / _bias_correction(count, beta1)).to(real), (m, v)


adamw_op = UpdateOp(
    "adamw_",
    states=("exp_avgs", "exp_avg_sqs"),
    settings={
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
    },
    formula=_adamw,
)


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    steps: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool = True,
    **options: Any,
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
    bits that the param lacks, such that it rounds to the param, to nearest, ties away from zero, or
    int8: the upper 8 of these, of values with 24 bits.
    steps: fp32 [params], counts. inv_scale, clip, found_inf: fp32, one element. lr: a
    number or an fp32 or fp64 tensor of one element. All on one device.

    bf16 and uint8 moments, and with stochastic_rounding bf16 params without a master, are rounded
    stochastically, to a neighbour with probability proportional to its nearness: Philox4x32-10
    keyed by seed, counted by element, step and indices[i] (one number per param), so calls are
    reproducible. The arithmetic is FP32 (FP64 for fp64 params) in exactly this order: all backends
    give the same bits. Sources: Adam (Kingma, Ba, 2015), Decoupled Weight Decay Regularization
    (Loshchilov, Hutter, 2019).
    """
    settings = (beta1, beta2, eps, weight_decay, decoupled_weight_decay)
    adamw_op.run(settings, params, grads, [exp_avgs, exp_avg_sqs], masters, steps, lr, **options)


def _sign(c: torch.Tensor) -> torch.Tensor:
    """1, -1 or +0; NaN for NaN, where torch.sign gives 0."""
    return torch.where(c.isnan(), c, (c > 0).to(c.dtype) - (c < 0).to(c.dtype))


def _lion(p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step) -> Updated:
    lr, _, (beta1, beta2, weight_decay) = step
    (m,), real = states, p.dtype
    p = _decayed(p, lr, weight_decay)
    c = m + (g - m) * rounded(1 - beta1, real)
    return p - _sign(c) * lr.to(real), (m + (g - m) * rounded(1 - beta2, real),)


lion_op = UpdateOp(
    "lion_",
    states=("exp_avgs",),
    settings={"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01},
    formula=_lion,
)


def lion_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    masters: Tensors,
    steps: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> None:
    """One Lion step over lists of tensors, in place; no change if found_inf != 0.

        step += 1
        g = grad * inv_scale * clip, bounded by +-max_value     (negated if maximize)
        p = p - lr * weight_decay * p  unless that is 0         p: master, or param without one
        c = m + (g - m) * (1 - beta1)                           m: exp_avg
        p = p - lr * sign(c)                                    sign(0) = 0, sign(NaN) = NaN
        m = m + (g - m) * (1 - beta2)
        master = p;  param = p rounded to nearest even

    exp_avgs: one tensor per param, fp32 (fp64 for fp64 params) or bf16, of its shape. All other
    arguments are as in `adamw_`. Source: Symbolic Discovery of Optimization Algorithms (Chen et
    al., 2023).
    """
    settings = (beta1, beta2, weight_decay)
    lion_op.run(settings, params, grads, [exp_avgs], masters, steps, lr, **options)


def _sgd(p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step) -> Updated:
    lr, count, (momentum, dampening, weight_decay, nesterov) = step
    real = p.dtype
    if (decay := rounded(weight_decay, real)) != 0:  # 0 * Inf would be NaN
        g = g + p * decay
    if states:
        factor = rounded(momentum, real)
        later = states[0] * factor + g * rounded(1 - dampening, real)
        b = torch.where(count == 1, g, later)
        states = (b,)
        g = g + b * factor if nesterov else b
    return p - g * lr.to(real), states


sgd_op = UpdateOp(
    "sgd_",
    states=("momentum_buffers",),
    settings={"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False},
    formula=_sgd,
    stateless=True,
)


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    steps: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    **options: Any,
) -> None:
    """One SGD step over lists of tensors, in place; no change if found_inf != 0.

        step += 1
        g = grad * inv_scale * clip, bounded by +-max_value     (negated if maximize)
        g = g + weight_decay * p  unless that is 0              p: master, or param without one
        b = g at step 1, later b * momentum + g * (1 - dampening)        b: momentum_buffer
        g = g + momentum * b with nesterov, else b              (without buffers, g is unchanged)
        p = p - lr * g
        master = p;  param = p rounded to nearest even

    momentum_buffers: one tensor per param, or an empty list for SGD without momentum; fp32 (fp64
    for fp64 params), bf16 or uint8 codes, of the param's shape. All other arguments are as in
    `adamw_`. Source: On the importance of initialization and momentum in deep learning (Sutskever
    et al., 2013), in the form of torch.optim.SGD.
    """
    settings = (momentum, dampening, weight_decay, nesterov)
    sgd_op.run(settings, params, grads, [momentum_buffers], masters, steps, lr, **options)


def _muon_direction(p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step) -> Updated:
    momentum, nesterov = step.settings
    (b,), weight = states, rounded(1 - momentum, g.dtype)
    b = b + (g - b) * weight
    return b + (g - b) * weight if nesterov else b, (b,)


muon_direction_op = UpdateOp(
    "muon_direction_",
    states=("momentum_buffers",),
    settings={"momentum": 0.95, "nesterov": False},
    formula=_muon_direction,
)


def muon_direction_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    masters: Tensors,
    steps: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool = True,
    lr: float = 0.0,
    **options: Any,
) -> None:
    """What Muon orthogonalizes, over lists of tensors; no change if found_inf != 0.

        step += 1
        g = grad * inv_scale * clip, bounded by +-max_value     (negated if maximize)
        b = b + (g - b) * (1 - momentum)                        b: momentum_buffer
        param = b + (g - b) * (1 - momentum) with nesterov, else b

    params: receive the direction; what they held is not used. momentum_buffers: one tensor per
    param, fp32 (fp64 for fp64 params), bf16 or uint8 codes, of its shape. masters, usually empty,
    and all other arguments are as in `adamw_`; lr has no effect. Source: Muon (Jordan et al.,
    2024), in the form of torch.optim.Muon.
    """
    settings = (momentum, nesterov)
    states = [momentum_buffers]
    muon_direction_op.run(settings, params, grads, states, masters, steps, lr, **options)
