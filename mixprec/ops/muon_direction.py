"""muon_direction_: unscale, clip and momentum of Muon, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch.optimizer_update import Step, Tensors, UpdateOp, UpdateOptions, rounded


def _formula(
    p: torch.Tensor, g: torch.Tensor, states: Tensors, step: Step
) -> tuple[torch.Tensor, Tensors]:
    momentum, nesterov = step.settings
    (b,), weight = states, rounded(1 - momentum, g.dtype)
    b = b + (g - b) * weight
    return b + (g - b) * weight if nesterov else b, (b,)


muon_direction_op = UpdateOp(
    "muon_direction_",
    states=("momentum_buffers",),
    settings={"momentum": 0.95, "nesterov": False},
    formula=_formula,
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
    given = UpdateOptions(lr, **options)
    muon_direction_op.run(settings, given, params, grads, [momentum_buffers], masters, steps)
