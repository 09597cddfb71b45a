"""sgd_: unscale, clip, SGD with momentum and the write-back to low precision, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._dispatch import example_inputs, optimizer_update, rounding
from ._dispatch.op import Op

__all__ = ["sgd_", "sgd_op", "sgd_reference_"]


def sgd_reference_(args: Any) -> None:
    update = optimizer_update.Update(args)
    for i in range(len(args.params)):
        real, g, p = update.real(i), update.gradient(i), update.master(i)
        # 0 * Inf would be NaN.
        if (decay := optimizer_update.rounded(args.weight_decay, real)) != 0:
            g = g + p * decay
        if args.momentum_buffers:
            buffer = args.momentum_buffers[i]
            factor = optimizer_update.rounded(args.momentum, real)
            new = g * optimizer_update.rounded(1 - args.dampening, real)
            later = update.read_state(i, buffer, rounding.FIRST_STATE) * factor + new
            b = torch.where(update.counts[i] == 1, g, later)
            g = g + b * factor if args.nesterov else b
            update.write_state(i, buffer, b, rounding.FIRST_STATE)
        update.write_param(i, p - g * update.lr.to(real))


def _check(args: Any) -> None:
    optimizer_update.check(
        "sgd_", args, states=("momentum_buffers",), may_be_empty=("momentum_buffers", "masters")
    )


sgd_op = Op(
    "sgd_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    "Tensor(d!) steps, float lr, float momentum, float dampening, float weight_decay, "
    "bool nesterov, " + optimizer_update.SHARED_SCHEMA,
    reference=sgd_reference_,
    check=_check,
    examples=example_inputs.sgd,
    triton="sgd",
)


def sgd_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
    state_scales: Sequence[torch.Tensor] = (),
    lr: float | torch.Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    max_value: float = math.inf,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] = (),
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
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
    optimizer_update.prepare("sgd_", params, steps)
    if not params:
        return
    sgd_op(
        params,
        grads,
        momentum_buffers,
        masters,
        steps,
        0.0 if isinstance(lr, torch.Tensor) else lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
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
