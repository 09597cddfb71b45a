"""muon_direction_: unscale, clip and momentum of Muon, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import example_inputs, optimizer_update, rounding
from ._dispatch.op import Op

__all__ = ["muon_direction_", "muon_direction_op", "muon_direction_reference_"]


def muon_direction_reference_(args: Any) -> None:
    update = optimizer_update.Update(args)
    for i, buffer in enumerate(args.momentum_buffers):
        real, g = update.real(i), update.gradient(i)
        weight = optimizer_update.rounded(1 - args.momentum, real)
        b = update.read_state(i, buffer, rounding.FIRST_STATE)
        b = b + (g - b) * weight
        update.write_state(i, buffer, b, rounding.FIRST_STATE)
        update.write_param(i, b + (g - b) * weight if args.nesterov else b)


def _check(args: Any) -> None:
    optimizer_update.check("muon_direction_", args, states=("momentum_buffers",))


muon_direction_op = Op(
    "muon_direction_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    "Tensor(d!) steps, float lr, float momentum, bool nesterov, " + optimizer_update.SHARED_SCHEMA,
    reference=muon_direction_reference_,
    check=_check,
    examples=example_inputs.muon_direction,
    triton="muon_direction",
)


def muon_direction_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    state_scales: Sequence[torch.Tensor] = (),
    momentum: float,
    nesterov: bool = True,
    lr: float = 0.0,
    maximize: bool = False,
    max_value: float = math.inf,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] = (),
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
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
    optimizer_update.prepare("muon_direction_", params, steps)
    if not params:
        return
    muon_direction_op(
        params,
        grads,
        momentum_buffers,
        masters,
        steps,
        lr,
        momentum,
        nesterov,
        state_scales,
        maximize,
        max_value,
        stochastic_rounding,
        seed,
        indices,
        None,
        inv_scale,
        clip,
        found_inf,
    )
