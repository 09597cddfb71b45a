"""The state of one parameter: created at its first step, kept up to date, restored exactly.

Moments in 8 bits are codes of the param's shape beside their scales, under `<moment>_scale`, in
the format of ops/_reference/state8.py. Its values are BF16 numbers and encoding them again changes
none, so that they can be converted and restored without loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from .. import _masters
from .._local_gradients import LOW_PRECISION, is_sharded, local
from ..ops._reference import state8
from ..ops._reference.rounding import lower_half, upper_half

_REMAINDERS = {"remainder16": torch.int16, "remainder8": torch.int8}
_MAX_STEP = 2**24  # step is counted in fp32
CODES = torch.uint8
_SCALE, _CODES = "_scale", "_codes"
_MIN_NUMEL = 4096  # smaller params keep FP32 moments: 0.1 % of a model's state, but often its norms


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(option: torch.dtype | str) -> torch.dtype:
    """The dtype of moments with this `state_dtype`."""
    return CODES if isinstance(option, str) else option


def _takes_codes(param: torch.Tensor) -> bool:
    """Whether the moments of a param are kept in 8 bits: the same on all ranks of a DTensor."""
    return param.numel() >= _MIN_NUMEL and param.dtype != torch.float64


@dataclass(frozen=True)
class Policy:
    """Which state an optimizer, or one of its groups, keeps for a param of each dtype."""

    who: str
    number: int  # of the optimizer, by which it knows its masters
    master_weights: str | None
    state_dtype: torch.dtype
    stochastic_rounding: bool

    def options(self) -> dict[str, Any]:
        coded = self.state_dtype == CODES
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
        if self.state_dtype == CODES and not _takes_codes(param):
            return torch.float32
        return self.state_dtype

    @cached_property
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
            if (dtype := self.moments(param)) == CODES:
                state.update(_zero_codes(param, name))
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
        saved = {
            name.removesuffix(_CODES): value for name, value in saved.items() if value is not None
        }
        if not saved:
            return {}
        scales = {name + _SCALE: name for name in moments}
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
        if getattr(saved.get("remainder"), "dtype", None) == torch.float16:  # `portable`
            saved["remainder"] = _bits(saved["remainder"], torch.int16)
        for name in saved.keys() & set(_masters.FORMS):
            if name != place and param.dtype != torch.float32:  # which gets the bits that it lacks
                raise ValueError(
                    f"{who}: the state holds a {name}, for which a {short(param.dtype)} param has "
                    f"no place with master_weights={self.master_weights!r}, "
                    f"stochastic_rounding={self.stochastic_rounding}; use the options that it was "
                    "saved with, or delete the key to go on from the weights alone"
                )
        real = self.moments(param)
        for name in moments:
            if name in saved:
                state.update(_restored_moment(who, param, name, saved, real))
        if "master" in saved:
            state["master"] = checked(who, "master", param, saved["master"], torch.float32)
        if "remainder" in saved:  # of 8 bits in place of 16: to nearest
            mine, remainder = self.remainder, saved["remainder"]
            (other,) = {*_REMAINDERS.values()} - {mine}
            kept = other if getattr(remainder, "dtype", None) == other else mine
            bits = checked(who, "remainder", param, remainder, kept)
            half = lower_half if mine == torch.int16 else upper_half
            state["remainder"] = bits if kept == mine else half(bits)
        return state


def _step(who: str, param: torch.Tensor, step: torch.Tensor | float) -> torch.Tensor:
    count = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(count, torch.Tensor) or not (0 <= count < _MAX_STEP and count == int(count)):
        raise ValueError(f"{who}: step must be a whole number below 2^24, got {step}")
    return torch.tensor(float(count), dtype=torch.float32, device=param.device)


def checked(
    who: str,
    name: str,
    param: torch.Tensor,
    t: Any,
    dtype: torch.dtype,
    narrower: tuple[torch.dtype, ...] = (),
) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or t.shape != param.shape:
        got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"{who}: {name} must be a tensor of shape {tuple(param.shape)}, got {got}")
    if t.layout != torch.strided:
        raise ValueError(f"{who}: {name} must be dense, got layout {t.layout}")
    if is_sharded(t) != is_sharded(param):
        raise ValueError(
            f"{who}: {name} must be sharded as its param is; use torch.distributed.checkpoint"
        )
    if t.dtype not in (dtype, *narrower):
        allowed = ", ".join(map(short, (dtype, *narrower)))
        raise ValueError(f"{who}: {name} must have dtype {allowed}, got {short(t.dtype)}")
    return t.detach().to(param.device, dtype, copy=True)


def _kind(moment: str) -> state8.Codes:
    return state8.UNSIGNED if moment == "exp_avg_sq" else state8.SIGNED


def _zero_codes(param: torch.Tensor, moment: str) -> dict[str, torch.Tensor]:
    """The two entries of a moment that is zero."""
    count, device = state8.blocks(local(param).numel()), param.device
    scale = torch.zeros(count, dtype=torch.float32, device=device)
    return {moment: torch.zeros_like(param, dtype=CODES), moment + _SCALE: scale}


def _decode(moment: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values, in FP32."""
    values = torch.zeros_like(codes, dtype=torch.float32)
    local(values).copy_(state8.decode(local(codes), scale, _kind(moment)))
    return values


def scales(states: list[dict[str, Any]], moments: tuple[str, ...]) -> list[torch.Tensor]:
    """Of each moment in turn one per param; any tensor for one that is not in 8 bits."""
    return [s.get(name + _SCALE, s["step"]) for name in moments for s in states]


def widened(
    state: dict[str, Any], moments: tuple[str, ...], dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """The state of a param with moments in `dtype` instead of codes and BF16."""
    result = dict(state)
    for name in moments:
        if name + _SCALE in state:
            result[name] = _decode(name, state[name], result.pop(name + _SCALE)).to(dtype)
        elif name in state and state[name].dtype == torch.bfloat16:
            result[name] = state[name].to(dtype)
    return result


def portable(state: dict[str, Any], moments: tuple[str, ...]) -> dict[str, Any]:
    """A state to save: codes as BF16 where there are other ranks, which may cut other blocks;
    elsewhere under `<moment>_codes`, so that they are never taken for values. Also where there are
    ranks a remainder of 16 bits as the FP16 with these bits: no backend gathers int16."""
    coded = [name for name in moments if name + _SCALE in state]
    ranks = dist.is_available() and dist.is_initialized()
    if ranks or any(map(is_sharded, state.values())):
        state = widened(state, moments, torch.bfloat16) if coded else dict(state)
        if "remainder" in state and state["remainder"].dtype == torch.int16:
            state["remainder"] = _bits(state["remainder"], torch.float16)
        return state
    return {name + _CODES if name in coded else name: value for name, value in state.items()}


def _bits(remainder: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _masters.forms.like(remainder, local(remainder).view(dtype))


def _restored_moment(
    who: str, param: torch.Tensor, moment: str, saved: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The entries of a moment to load, which has `dtype` here and in the checkpoint any."""
    values = saved[moment]
    if getattr(values, "dtype", None) != CODES:
        wide = torch.float32 if dtype == CODES else dtype
        narrower = LOW_PRECISION if wide == torch.float32 else ()
        values = checked(who, moment, param, values, wide, narrower)
        if dtype != CODES:
            return {moment: values}
        entries = _zero_codes(param, moment)
        encoded, block_scale = state8.encode(local(values).float(), _kind(moment))
        local(entries[moment]).copy_(encoded)
        entries[moment + _SCALE].copy_(block_scale)
        return entries
    codes = checked(who, moment, param, values, CODES)
    scale: Any = saved.get(moment + _SCALE)
    wanted = (state8.blocks(local(codes).numel()),)
    is_tensor = isinstance(scale, torch.Tensor)
    if not is_tensor or scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        got = f"{short(scale.dtype)} {tuple(scale.shape)}" if is_tensor else scale
        raise ValueError(
            f"{who}: {moment}{_SCALE} must be float32 of shape {wanted}, one per {state8.BLOCK} "
            f"elements of {moment}, got {got}"
        )
    scale = scale.detach().to(param.device, copy=True)
    if dtype == CODES:
        return {moment: codes, moment + _SCALE: scale}
    return {moment: _decode(moment, codes, scale).to(dtype)}


def described(optimizer: Any) -> str:
    """The kinds of params, the options that are set and the skipped steps, a line each."""
    policy, grad_dtype = optimizer._policy, optimizer._grad_dtype
    groups = [(optimizer._policy_of(group), group["params"]) for group in optimizer.param_groups]
    kinds = Counter(
        short(p.dtype) + _described_form(p, its) for its, params in groups for p in params
    )
    states = {torch.bfloat16: "bfloat16", CODES: "int8"}
    fields = {
        "params": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "state_dtype": states.get(policy.state_dtype),
        "grad_dtype": None if grad_dtype is None else short(grad_dtype),
        "max_grad_norm": optimizer.max_grad_norm,
        "max_grad_value": optimizer.max_grad_value,
        "release_gradients": optimizer._release_gradients or None,
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
