"""What an optimizer prints of itself before its param groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .._local_gradients import LOW_PRECISION
from ._checked import short
from ._state import Policy

_STATES = {torch.bfloat16: "bfloat16"}


def lines(optimizer: Any) -> str:
    """The kinds of params, the options that are set and the skipped steps, a line each."""
    policy, grad_dtype = optimizer._policy, optimizer._grad_dtype
    groups = [(optimizer._policy_of(group), group["params"]) for group in optimizer.param_groups]
    kinds = Counter(short(p.dtype) + _kept(p, its) for its, params in groups for p in params)
    wide = policy.state_dtype == torch.float32
    told = {
        "params": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "state_dtype": None if wide else _STATES.get(policy.state_dtype, "int8"),
        "grad_dtype": None if grad_dtype is None else short(grad_dtype),
        "max_grad_norm": optimizer.max_grad_norm,
        "max_grad_value": optimizer.max_grad_value,
        "release_gradients": optimizer._release_gradients or None,
        "clip": None if optimizer._clip == "current" else optimizer._clip,
        "skipped steps": int(optimizer.skipped),  # waits for a GPU, the only place that knows
    }
    return "".join(f"    {name}: {text}\n" for name, text in told.items() if text is not None)


def _kept(param: torch.Tensor, policy: Policy) -> str:
    if param.dtype not in LOW_PRECISION:
        return ""
    if kept := policy.master(param):
        bits = 8 * policy.remainder.itemsize
        return " with FP32 masters" if kept == "master" else f" with {bits}-bit remainders"
    rounded_at_random = policy.stochastic_rounding and param.dtype == torch.bfloat16
    return " with stochastic rounding" if rounded_at_random else " without masters"
