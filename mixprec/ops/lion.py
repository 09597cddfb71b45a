"""lion_: unscale, clip, Lion and the write-back to low precision, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import example_inputs, optimizer_update, rounding
from ._dispatch.op import Op

__all__ = ["lion_", "lion_op", "lion_reference_"]


def _sign(c: torch.Tensor) -> torch.Tensor:
    """1, -1 or +0; NaN for NaN, where torch.sign gives 0."""
    return torch.where(c.isnan(), c, (c > 0).to(c.dtype) - (c < 0).to(c.dtype))


def lion_reference_(args: Any) -> None:
    update = optimizer_update.Update(args)
    for i, m in enumerate(args.exp_avgs):
        real, g, p = update.real(i), update.gradient(i), update.master(i)
        # Without decay an infinite p is unchanged: 0 * Inf would be NaN.
        decay = (update.lr * args.weight_decay).to(real)
        p = torch.where(decay != 0, p - p * decay, p)
        old = update.read_state(i, m, rounding.FIRST_STATE)
        c = old + (g - old) * optimizer_update.rounded(1 - args.beta1, real)
        p = p - _sign(c) * update.lr.to(real)
        new = old + (g - old) * optimizer_update.rounded(1 - args.beta2, real)
        update.write_state(i, m, new, rounding.FIRST_STATE)
        update.write_param(i, p)


def _check(args: Any) -> None:
    optimizer_update.check("lion_", args, states=("exp_avgs",))


lion_op = Op(
    "lion_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] masters, "
    "Tensor(d!) steps, float lr, float beta1, float beta2, float weight_decay, "
    + optimizer_update.SHARED_SCHEMA,
    reference=lion_reference_,
    check=_check,
    examples=example_inputs.lion,
    triton="lion",
)


def lion_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    state_scales: Sequence[torch.Tensor] = (),
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    max_value: float = math.inf,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] = (),
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
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
    optimizer_update.prepare("lion_", params, steps)
    if not params:
        return
    lion_op(
        params,
        grads,
        exp_avgs,
        masters,
        steps,
        0.0 if isinstance(lr, torch.Tensor) else lr,
        beta1,
        beta2,
        weight_decay,
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
