"""lion_: unscale, clip, Lion and the write-back to low precision, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch.optimizer_update import Step, Tensors, UpdateOp, UpdateOptions, rounded


def _sign(c: torch.Tensor) -> torch.Tensor:
    """1, -1 or +0; NaN for NaN, where torch.sign gives 0."""
    return torch.where(c.isnan(), c, (c > 0).to(c.dtype) - (c < 0).to(c.dtype))


def _formula(
    p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step
) -> tuple[torch.Tensor, Tensors]:
    lr, _, (beta1, beta2, weight_decay) = step
    (m,), real = states, p.dtype
    # Without decay an infinite p is unchanged: 0 * Inf would be NaN.
    decay = (lr * weight_decay).to(real)
    p = torch.where(decay != 0, p - p * decay, p)
    c = m + (g - m) * rounded(1 - beta1, real)
    return p - _sign(c) * lr.to(real), (m + (g - m) * rounded(1 - beta2, real),)


lion_op = UpdateOp(
    "lion_",
    states=("exp_avgs",),
    settings={"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01},
    formula=_formula,
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
    given = UpdateOptions(lr, **options)
    lion_op.run(settings, given, params, grads, [exp_avgs], masters, steps)
