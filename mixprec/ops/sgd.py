"""sgd_: unscale, clip, SGD with momentum and the write-back to low precision, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ._dispatch import backends, checks, library, optimizer_update, rounding


def sgd_reference_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum_buffers: list[torch.Tensor],
    masters: list[torch.Tensor],
    steps: torch.Tensor,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    max_value: float,
    stochastic_rounding: bool,
    seed: int,
    indices: list[int],
    lr_tensor: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    skip, counts = optimizer_update.advance(steps, found_inf)
    rate = torch.full((), lr, dtype=torch.float64, device=steps.device)
    if lr_tensor is not None:
        rate = lr_tensor.reshape(()).double()
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        real = optimizer_update.real_dtype(param)
        master = masters[i] if masters else None
        random = (seed, counts[i], indices[i]) if indices else (0, counts[i], 0)
        p = optimizer_update.truth(param, master)
        g = optimizer_update.gradient(grad, real, inv_scale, clip, max_value, maximize)
        if (decay := optimizer_update.rounded(weight_decay, real)) != 0:  # 0 * Inf would be NaN
            g = g + p * decay
        if momentum_buffers:
            buffer, factor = momentum_buffers[i], optimizer_update.rounded(momentum, real)
            later = buffer.to(real) * factor + g * optimizer_update.rounded(1 - dampening, real)
            b = torch.where(counts[i] == 1, g, later)
            g = g + b * factor if nesterov else b
            optimizer_update.write_state(buffer, b, skip, (*random, rounding.FIRST_STATE))
        p = p - g * rate.to(real)
        stochastic = (*random, rounding.PARAM) if stochastic_rounding else None
        optimizer_update.write_param(param, master, p, skip, stochastic)


def _check(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    max_value: float,
    stochastic_rounding: bool,
    seed: int,
    indices: Sequence[int],
    lr_tensor: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    states = {"momentum_buffers": momentum_buffers}
    options = (max_value, stochastic_rounding, indices)
    scalars = (lr_tensor, inv_scale, clip, found_inf)
    empty = ("momentum_buffers", "masters")
    optimizer_update.check("sgd_", params, grads, states, masters, steps, *options, *scalars, empty)


library.define(
    "sgd_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    "Tensor(d!) steps, float lr, float momentum, float dampening, float weight_decay, "
    "bool nesterov, " + optimizer_update.SHARED_SCHEMA,
    check=_check,
    reference=sgd_reference_,
)


def sgd_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    *,
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
    """One SGD step over lists of tensors, in place; nothing at all where found_inf != 0.

        step += 1
        g = grad * inv_scale * clip, bounded by +-max_value     (negated if maximize)
        g = g + weight_decay * p  unless that is 0              p: master, or param without one
        b = g at step 1, later b * momentum + g * (1 - dampening)        b: momentum_buffer
        g = g + momentum * b with nesterov, else b              (no line of b without buffers)
        p = p - lr * g
        master = p;  param = p rounded to nearest even

    momentum_buffers: one tensor per param, or an empty list for SGD without momentum; fp32 (fp64
    for fp64 params) or bf16, of the param's shape. Everything else as in `adamw_`. Source: On the
    importance of initialization and momentum in deep learning (Sutskever et al., 2013), in the
    form of torch.optim.SGD.
    """
    lists = (params, grads, momentum_buffers, masters)
    for name, tensors in zip(("params", "grads", "momentum_buffers", "masters"), lists,
                             strict=True):  # fmt: skip
        checks.is_sequence("sgd_", name, tensors)
    if not params:
        return
    checks.is_tensor("sgd_", "steps", steps)
    checks.needs_no_grad("sgd_", "call it under torch.no_grad()", *params)
    lr_tensor, lr = (lr, 0.0) if isinstance(lr, torch.Tensor) else (None, lr)
    numbers = (lr, momentum, dampening, weight_decay, nesterov)
    shared = (maximize, max_value, stochastic_rounding, seed, indices)
    device = steps.device.type
    backends.call(
        *("sgd_", device, *lists, steps, *numbers, *shared),
        *(lr_tensor, inv_scale, clip, found_inf),
    )
    checks.mutated(*params, *momentum_buffers, *masters, steps)
