"""The state of one parameter: created at its first step, kept up to date, restored exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from .. import _masters
from .._local_gradients import LOW_PRECISION
from ..ops._reference.rounding import lower_half, upper_half
from . import _state8
from ._state8 import checked, short

_REMAINDERS = {"remainder16": torch.int16, "remainder8": torch.int8}
_MAX_STEP = 2**24  # step is counted in fp32


@dataclass(frozen=True)
class Policy:
    """Which state an optimizer, or one of its groups, keeps for a param of each dtype."""

    who: str
    number: int  # of the optimizer, by which it knows its masters
    master_weights: str | None
    state_dtype: torch.dtype
    stochastic_rounding: bool

    def options(self) -> dict[str, Any]:
        coded = self.state_dtype == _state8.CODES
        return {
            "master_weights": self.master_weights,
            "state_dtype": "int8" if coded else self.state_dtype,
            "stochastic_rounding": self.stochastic_rounding,
        }

    def master(self, param: torch.Tensor) -> str | None:
        """The state key that extends the param to an FP32 number; None if there is none."""
        if self.master_weights is None or param.dtype not in LOW_PRECISION:
            return None
        if param.dtype == torch.bfloat16:
            if self.stochastic_rounding:
                return None
            if self.master_weights in _REMAINDERS:
                return "remainder"
        return "master"

    @property
    def remainder(self) -> torch.dtype:
        """Of the remainders, if the policy has them."""
        return _REMAINDERS.get(self.master_weights or "", torch.int16)

    def moments(self, param: torch.Tensor) -> torch.dtype:
        if param.dtype == torch.float64:
            return torch.float64
        if self.state_dtype == _state8.CODES and not _state8.takes_codes(param):
            return torch.float32
        return self.state_dtype

    @property
    def random(self) -> bool:
        """Whether an update may round at random."""
        wide = self.state_dtype == torch.float32
        return self.stochastic_rounding or not wide or self.master_weights == "remainder8"

    def prepare(self, param: torch.Tensor, state: dict[str, Any], moments: tuple[str, ...]) -> None:
        """Create missing state. If other code modified the param, update its master.

        The master is kept where it still rounds to the param, so that loading a model's weights
        after the optimizer's state preserves all its bits. A remainder is always kept: it is less
        than half a unit of the new value.
        """
        for name in moments:
            if (held := state.get(name)) is not None and held.shape != param.shape:
                raise ValueError(
                    f"{self.who}: the {name} of a param of shape {tuple(param.shape)} has shape "
                    f"{tuple(held.shape)}: cut or extend all entries of state[param] as the param"
                )
        self.claim(param, state)
        self.create(param, state, moments)

    def create(self, param: torch.Tensor, state: dict[str, Any], moments: tuple[str, ...]) -> None:
        """Create what is missing beside the master."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in moments:
            if name in state:
                continue
            if (dtype := self.moments(param)) == _state8.CODES:
                state.update(_state8.create(param, name))
            else:
                state[name] = torch.zeros_like(param, dtype=dtype)

    def claim(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Have the FP32 values behind the param in the form that is kept here, and in `state`."""
        form = self.master(param)
        _masters.claim(self.who, param, state, form, self.remainder, self.number)

    def restore(
        self,
        who: str,
        param: torch.Tensor,
        saved: dict[str, Any],
        moments: tuple[str, ...],
        required: tuple[str, ...],
    ) -> dict[str, Any]:
        """The loaded state, copied to the param's device.

        Moments must have the optimizer's dtype, or one that converts to it exactly; in 8 bits they
        may have any, and are rounded to nearest. Anything else raises ValueError.
        """
        saved = {name: value for name, value in saved.items() if value is not None}
        if not saved:
            return {}
        scales = {name + _state8.SUFFIX: name for name in moments}
        if (
            saved.keys() - {"step", *moments, *scales, *_masters.FORMS}
            or set(required) - saved.keys()
        ):
            raise ValueError(
                f"{who}: a state must hold {', '.join(('step', *moments))}, got "
                f"{', '.join(saved)}: is this a checkpoint of another optimizer?"
            )
        # torch.optim.SGD has no step count; a state with a buffer has had its first step.
        state: dict[str, Any] = {"step": _step(who, param, saved.get("step", 1.0))}
        place = self.master(param)
        for name in saved.keys() & set(_masters.FORMS):
            if name != place and param.dtype != torch.float32:  # which gets the bits that it lacks
                raise ValueError(
                    f"{who}: the state holds a {name}, for which a {short(param.dtype)} param has "
                    f"no place with master_weights={self.master_weights!r}, "
                    f"stochastic_rounding={self.stochastic_rounding}; use the options that it was "
                    "saved with, or delete the key to go on from the weights alone"
                )
        real = self.moments(param)
        for name in (*moments, *_masters.FORMS):
            if name not in saved:
                continue
            if name in moments and _state8.CODES in (real, getattr(saved[name], "dtype", None)):
                state.update(_state8.restored(who, param, name, saved, real))
                continue
            if name == "remainder":
                state[name] = self._restored_remainder(who, param, saved[name])
                continue
            dtype = torch.float32 if name == "master" else real
            narrower = LOW_PRECISION if dtype == torch.float32 and name in moments else ()
            state[name] = checked(who, name, param, saved[name], dtype, narrower)
        return state

    def _restored_remainder(self, who: str, param: torch.Tensor, saved: Any) -> torch.Tensor:
        """Of 8 bits in place of 16: to nearest."""
        own = self.remainder
        (other,) = set(_REMAINDERS.values()) - {own}
        if getattr(saved, "dtype", None) != other:
            return checked(who, "remainder", param, saved, own, ())
        found = checked(who, "remainder", param, saved, other, ())
        return lower_half(found) if own == torch.int16 else upper_half(found)


def _step(who: str, param: torch.Tensor, step: torch.Tensor | float) -> torch.Tensor:
    count = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(count, torch.Tensor) or not (0 <= count < _MAX_STEP and count == int(count)):
        raise ValueError(f"{who}: step must be a whole number below 2^24, got {step}")
    return torch.tensor(float(count), dtype=torch.float32, device=param.device)


class _Hidden:
    """Hides a state from torch's Optimizer.load_state_dict, which would cast its tensors."""

    def __init__(self, state: Any) -> None:
        self.state = state


def hide_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook of load_state_dict that hides every state from it."""
    return {**state_dict, "state": {k: _Hidden(v) for k, v in state_dict["state"].items()}}


def show_states(states: dict[Any, Any]) -> dict[Any, Any]:
    """The inverse of hide_states."""
    return {k: v.state if isinstance(v, _Hidden) else v for k, v in states.items()}


_NARROW_STATES = {torch.bfloat16: "bfloat16"}


def described(optimizer: Any) -> str:
    """The kinds of params, the options that are set and the skipped steps, a line each."""
    policy, grad_dtype = optimizer._policy, optimizer._grad_dtype
    groups = [(optimizer._policy_of(group), group["params"]) for group in optimizer.param_groups]
    kinds = Counter(
        short(p.dtype) + _described_form(p, its) for its, params in groups for p in params
    )
    wide = policy.state_dtype == torch.float32
    fields = {
        "params": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "state_dtype": None if wide else _NARROW_STATES.get(policy.state_dtype, "int8"),
        "grad_dtype": None if grad_dtype is None else short(grad_dtype),
        "max_grad_norm": optimizer.max_grad_norm,
        "max_grad_value": optimizer.max_grad_value,
        "release_gradients": optimizer._release_gradients or None,
        "clip": None if optimizer._clip == "current" else optimizer._clip,
        "skipped steps": int(optimizer.skipped),  # waits for a GPU, the only place that knows
    }
    return "".join(f"    {name}: {text}\n" for name, text in fields.items() if text is not None)


def _described_form(param: torch.Tensor, policy: Policy) -> str:
    if param.dtype not in LOW_PRECISION:
        return ""
    if kept := policy.master(param):
        bits = 8 * policy.remainder.itemsize
        return " with FP32 masters" if kept == "master" else f" with {bits}-bit remainders"
    rounded_at_random = policy.stochastic_rounding and param.dtype == torch.bfloat16
    return " with stochastic rounding" if rounded_at_random else " without masters"
