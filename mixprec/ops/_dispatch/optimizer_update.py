"""What the optimizer updates have in common: their arguments' checks, and reading and writing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from . import checks, rounding

REMAINDER = torch.int16  # of a master: the bits that a bf16 param lacks
# The end of every update's schema.
SHARED_SCHEMA = (
    "bool maximize, float max_value, bool stochastic_rounding, int seed, int[] indices, "
    "Tensor? lr_tensor, Tensor? inv_scale, Tensor? clip, Tensor? found_inf) -> ()"
)


def real_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def rounded(value: float, real: torch.dtype) -> float:
    """A constant as the arithmetic holds it."""
    return value if real == torch.float64 else ctypes.c_float(value).value


def advance(
    steps: torch.Tensor, found_inf: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the steps, unless skipped; return the flag that says so, and the counts."""
    flag = torch.zeros((), device=steps.device) if found_inf is None else found_inf
    skip = flag.reshape(()) != 0
    steps.copy_(torch.where(skip, steps, steps + 1))
    return skip, steps.clone()


def gradient(
    grad: torch.Tensor,
    real: torch.dtype,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    max_value: float,
    maximize: bool,
) -> torch.Tensor:
    g = grad.to(real)
    for factor in (inv_scale, clip):
        if factor is not None:
            g = g * factor.reshape(()).to(real)
    limit = rounded(max_value, real)
    g = torch.where(g > limit, limit, torch.where(g < -limit, -limit, g))  # NaN stays NaN
    return -g if maximize else g


def truth(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The number that is updated: the master where there is one."""
    if master is None:
        return param.to(real_dtype(param))
    return rounding.join_master(param, master) if master.dtype == REMAINDER else master


def write_state(
    state: torch.Tensor, value: torch.Tensor, skip: torch.Tensor, random: tuple[int, torch.Tensor,
    int, int],
) -> None:  # fmt: skip
    """random: seed, step, index, stream, for bf16 state, which is always rounded at random."""
    if state.dtype == torch.bfloat16:
        value = rounding.stochastic_bf16(value, rounding.random_bits(value.shape, *random))
    state.copy_(torch.where(skip, state, value))


def write_param(
    param: torch.Tensor,
    master: torch.Tensor | None,
    p: torch.Tensor,
    skip: torch.Tensor,
    random: tuple[int, torch.Tensor, int, int] | None,
) -> None:
    """random: seed, step, index, stream; None to round to nearest even."""
    if master is not None and master.dtype == REMAINDER:
        low, remainder = rounding.split_master(p)
        master.copy_(torch.where(skip, master, remainder))
    elif master is None and random is not None and param.dtype == torch.bfloat16:
        low = rounding.stochastic_bf16(p, rounding.random_bits(p.shape, *random))
    else:
        low = p.to(param.dtype)
        if master is not None:
            master.copy_(torch.where(skip, master, p))
    param.copy_(torch.where(skip, param, low))


def check(
    op: str,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: dict[str, Sequence[torch.Tensor]],
    masters: Sequence[torch.Tensor],
    steps: torch.Tensor,
    max_value: float,
    stochastic_rounding: bool,
    indices: Sequence[int],
    lr_tensor: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    may_be_empty: tuple[str, ...] = ("masters",),
) -> None:
    """states: the op's lists of moments, by name. may_be_empty: those that are left out so."""
    params = checks.is_list(op, "params", params)
    lists = {"grads": grads, **states, "masters": masters}
    for name, tensors in lists.items():
        count = len(checks.is_list(op, name, tensors))
        if count != len(params) and (count or name not in may_be_empty):
            raise ValueError(
                f"{op}: {name} must have one tensor per param ({len(params)}), got {count}"
            )
    checks.is_tensor(op, "steps", steps)
    device = steps.device
    checks.is_table(op, "steps", steps, torch.float32, (len(params),), device, "its own")
    for name, t in (("inv_scale", inv_scale), ("clip", clip), ("found_inf", found_inf)):
        if t is not None:
            checks.is_scalar(op, name, t, torch.float32)
            checks.on_device(op, name, t, device, "steps")
    if lr_tensor is not None:
        checks.is_tensor(op, "lr_tensor", lr_tensor)
        kind = torch.float64 if lr_tensor.dtype == torch.float64 else torch.float32
        checks.is_scalar(op, "lr_tensor", lr_tensor, kind)
        checks.on_device(op, "lr_tensor", lr_tensor, device, "steps")
    if not max_value > 0:
        raise ValueError(f"{op}: max_value must be positive, got {max_value}")
    if len(indices) not in (len(params), *([] if stochastic_rounding else [0])):
        raise ValueError(
            f"{op}: indices must have one number per param ({len(params)}) for stochastic "
            f"rounding, got {len(indices)}"
        )
    if any(not 0 <= i < 2**rounding._STREAM_SHIFT for i in indices):
        raise ValueError(f"{op}: indices must be in [0, 2^30), got {list(indices)}")
    for i, param in enumerate(params):
        checks.has_dtype(op, f"params[{i}]", param, checks.REALS)
        checks.on_device(op, f"params[{i}]", param, device, "steps")
        checks.is_writable(op, f"params[{i}]", param)
        real = real_dtype(param)
        narrow = (torch.bfloat16,) if real == torch.float32 else ()
        remainder = (REMAINDER,) if param.dtype == torch.bfloat16 else ()
        allowed = {"grads": checks.FLOATS if narrow else (real,), "masters": (real, *remainder)}
        for name, tensors in lists.items():
            if not tensors:
                continue
            t, label = tensors[i], f"{name}[{i}]"
            checks.has_shape(op, label, t, param.shape, f"params[{i}].shape")
            checks.has_dtype(op, label, t, allowed.get(name, (real, *narrow)))
            if name in states and t.dtype != real and not indices:
                raise ValueError(
                    f"{op}: {label} must have dtype float32, or bfloat16 with indices for its "
                    "stochastic rounding, got bfloat16 without"
                )
            checks.on_device(op, label, t, device, "steps")
            if name != "grads":
                checks.is_writable(op, label, t)
