"""The state of one parameter: made at its first step, its master kept true, restored exactly."""

from __future__ import annotations

from typing import Any

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
KEYS = ("step", "exp_avg", "exp_avg_sq")  # and "master", where there is one
_MAX_STEP = 2**24  # step is counted in fp32


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of the moments: that of the arithmetic of the update."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def prepare(param: torch.Tensor, state: dict[str, Any], master_weights: bool) -> None:
    """Make what the state lacks. Where someone wrote the param, its master follows.

    The master stays wherever it still rounds to the param: weights that are loaded after the
    optimizer's state, as they were saved with it, leave all its bits in place.
    """
    if not state:
        real = state_dtype(param)
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param, dtype=real)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=real)
    if not master_weights or param.dtype not in LOW_PRECISION:
        return
    master = state.get("master")
    if master is None:
        state["master"] = param.detach().to(torch.float32)
    else:
        same = master.to(param.dtype) == param
        master.copy_(torch.where(same, master, param.to(master.dtype)))


class _Hidden:
    """A tensor that Optimizer.load_state_dict does not see, and so does not cast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def hide_tensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before load_state_dict: the same state dict with the tensors of its state hidden."""

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: hide(v) for k, v in value.items()}
        return _Hidden(value) if isinstance(value, torch.Tensor) else value

    return {**state_dict, "state": hide(state_dict["state"])}


def show_tensors(value: Any) -> Any:
    """What hide_tensors was given."""
    if isinstance(value, dict):
        return {k: show_tensors(v) for k, v in value.items()}
    return value.tensor if isinstance(value, _Hidden) else value


def restore(
    who: str, param: torch.Tensor, saved: dict[str, Any], master_weights: bool
) -> dict[str, Any]:
    """The state to continue from, on the param's device, in copies that share no memory.

    Moments must be of the update's dtype, or 16-bit ones of torch.optim, which widen exactly; a
    master must be FP32 and its param 16 bits wide. Anything else is a ValueError: no value is
    ever rounded on its way.
    """
    if not saved:
        return {}
    known = {*KEYS, "master"}
    if not set(KEYS) <= set(saved) <= known:
        raise ValueError(f"{who}: a state must hold {', '.join(KEYS)}, got {', '.join(saved)}")
    state: dict[str, Any] = {"step": _step(who, param, saved["step"])}
    real = state_dtype(param)
    for name in ("exp_avg", "exp_avg_sq", "master"):
        if name not in saved:
            continue
        t = saved[name]
        if not isinstance(t, torch.Tensor) or t.shape != param.shape:
            got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
            shape = tuple(param.shape)
            raise ValueError(f"{who}: {name} must be a tensor of shape {shape}, got {got}")
        if name == "master":
            if not master_weights or param.dtype not in LOW_PRECISION:
                kept = "an fp32 or fp64 param" if master_weights else "master_weights=None"
                raise ValueError(
                    f"{who}: the state holds a master weight, which {kept} has no place for; "
                    "delete the key to go on from the param alone"
                )
            allowed: tuple[torch.dtype, ...] = (torch.float32,)
        else:
            allowed = (real,) if real == torch.float64 else (real, *LOW_PRECISION)
        if t.dtype not in allowed:
            words = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ValueError(f"{who}: {name} must have dtype {words}, got {t.dtype}")
        state[name] = t.detach().to(param.device, real, copy=True)
    return state


def _step(who: str, param: torch.Tensor, step: torch.Tensor | float) -> torch.Tensor:
    count = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(count, torch.Tensor) or not (0 <= count < _MAX_STEP and count == int(count)):
        raise ValueError(f"{who}: step must be a whole number below 2^24, got {step}")
    return torch.tensor(float(count), dtype=torch.float32, device=param.device)
