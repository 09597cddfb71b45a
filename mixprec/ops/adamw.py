"""adamw_: unscale, clip, AdamW and the write-back to low precision, in one pass over the state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _backends, _checks, _library
from .unscale import GRADS

_LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "steps")
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
    """The correctly rounded square root. torch's on the CPU is one unit off for some inputs: for
    FP32 it is taken in FP64, where that unit is rounded away; for FP64 by the math library."""
    if v.dtype == torch.float32:
        return v.double().sqrt().float()
    if v.device.type == "cpu":
        return v.clone().apply_(lambda x: math.sqrt(x) if x >= 0 else math.nan)
    return v.sqrt()


def adamw_reference_(
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
    flag = found_inf if found_inf is not None else torch.zeros((), device=params[0].device)
    skip = flag.reshape(()) != 0
    counts = torch.stack([s.reshape(()) for s in steps])
    counts = torch.where(skip, counts, counts + 1)
    for step, count in zip(steps, counts, strict=True):
        step.copy_(count.reshape(step.shape))
    bc1 = _bias_corrections(counts, beta1)
    step_sizes = torch.full_like(bc1, lr) / bc1  # number / tensor would round twice
    inv_sqrt_bc2 = 1.0 / _sqrt(_bias_corrections(counts, beta2))
    for i, (param, grad, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        truth = masters[i] if masters else param
        real = torch.float64 if truth.dtype == torch.float64 else torch.float32
        g = grad.to(real)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(real)
        if clip is not None:
            g = g * clip.reshape(()).to(real)
        if maximize:
            g = -g
        p = truth.to(real)
        constants = torch.tensor(
            [lr * weight_decay, 1 - beta1, 1 - beta2, beta2, eps], dtype=real
        ).tolist()
        decay, one_minus_beta1, one_minus_beta2, beta2_, eps_ = constants
        p = p - p * decay
        new_m = m.to(real) + (g - m.to(real)) * one_minus_beta1
        new_v = v.to(real) * beta2_ + (g * g) * one_minus_beta2
        denom = _sqrt(new_v) * inv_sqrt_bc2[i].to(real) + eps_
        p = p - (new_m / denom) * step_sizes[i].to(real)
        for target, value in ((m, new_m), (v, new_v), (truth, p)):
            target.copy_(torch.where(skip, target, value.to(target.dtype)))
        if masters:
            param.copy_(torch.where(skip, param, p.to(param.dtype)))


def _check(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
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
    op = "adamw_"
    params = _checks.is_list(op, "params", params)
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "masters": masters}
    for name, tensors in (*lists.items(), ("steps", steps)):
        count = len(_checks.is_list(op, name, tensors))
        if count != len(params) and (count or name != "masters"):
            raise ValueError(
                f"{op}: {name} must have one tensor per param ({len(params)}), got {count}"
            )
    for name, t in (("inv_scale", inv_scale), ("clip", clip), ("found_inf", found_inf)):
        if t is not None:
            _checks.is_scalar(op, name, t, torch.float32)
            if params:
                _checks.on_device(op, name, t, params[0].device, "params")
    for i, param in enumerate(params):
        _checks.has_dtype(op, f"params[{i}]", param, GRADS)
        _checks.on_device(op, f"params[{i}]", param, params[0].device, "params[0]")
        _checks.is_writable(op, f"params[{i}]", param)
        real = torch.float64 if param.dtype == torch.float64 else torch.float32
        for name, tensors in lists.items():
            if not tensors:
                continue
            t, label = tensors[i], f"{name}[{i}]"
            grads_allowed = _checks.FLOATS if real == torch.float32 else (real,)
            _checks.has_shape(op, label, t, param.shape, f"params[{i}].shape")
            _checks.has_dtype(op, label, t, grads_allowed if name == "grads" else (real,))
            _checks.on_device(op, label, t, param.device, "params")
            if name != "grads":
                _checks.is_writable(op, label, t)
        _checks.is_scalar(op, f"steps[{i}]", steps[i], torch.float32)
        _checks.on_device(op, f"steps[{i}]", steps[i], param.device, "params")


_library.define(
    "adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor(e!)[] steps, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool maximize, Tensor? inv_scale, Tensor? clip, Tensor? found_inf) -> ()",
    check=_check,
    reference=adamw_reference_,
)


def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One AdamW step over lists of tensors, in place; nothing at all where found_inf != 0.

        step += 1;  bc = 1 - beta^step
        g = grad * inv_scale * clip                       (negated if maximize)
        p = p - lr * weight_decay * p                     p: master, or param where there is none
        m = m + (g - m) * (1 - beta1)                     m: exp_avg
        v = v * beta2 + g * g * (1 - beta2)               v: exp_avg_sq
        p = p - (lr / bc1) * (m / (sqrt(v) / sqrt(bc2) + eps))
        master = p;  param = p rounded to nearest even

    params: fp32, bf16, fp16 or fp64, any shapes. grads: one per param, its shape, fp32, bf16 or
    fp16 (fp64 for fp64 params). exp_avgs, exp_avg_sqs: fp32 (fp64 for fp64 params) of the
    param's shape. masters: one fp32 tensor per param, or an empty list. steps: one fp32 element
    per param. inv_scale, clip, found_inf: fp32, one element. FP32 arithmetic (FP64 for fp64
    params) in exactly this order, so all backends give the same bits.
    Source: Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019).
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, steps)
    for name, tensors in zip(_LISTS, lists, strict=True):
        _checks.is_sequence("adamw_", name, tensors)
    if not params:
        return
    _checks.is_tensor("adamw_", "params[0]", params[0])
    _checks.needs_no_grad("adamw_", "call it under torch.no_grad()", *params)
    numbers = (lr, beta1, beta2, eps, weight_decay, maximize)
    device = params[0].device.type
    _backends.call("adamw_", device, *lists, *numbers, inv_scale, clip, found_inf)
    _checks.mutated(*params, *exp_avgs, *exp_avg_sqs, *masters, *steps)
