"""sgd_: unscale, clip, SGD with momentum and the write-back to low precision, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch.optimizer_update import Step, Tensors, UpdateOp, UpdateOptions, rounded


def _formula(
    p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step
) -> tuple[torch.Tensor, Tensors]:
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
    formula=_formula,
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
    given = UpdateOptions(lr, **options)
    sgd_op.run(settings, given, params, grads, [momentum_buffers], masters, steps)
