"""Moments in 8 bits: codes of the param's shape beside their scales, under `<moment>_scale`.

The format is that of ops/_reference/state8.py. Its values are BF16 numbers and encoding them again
changes none, so that they can be converted and restored without loss.
"""

from __future__ import annotations

from typing import Any

import torch

from .._local_gradients import LOW_PRECISION, is_sharded, local
from ..ops._reference import state8


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checked(
    who: str,
    name: str,
    param: torch.Tensor,
    t: Any,
    dtype: torch.dtype,
    narrower: tuple[torch.dtype, ...],
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


CODES = torch.uint8
SUFFIX = "_scale"
_MIN_NUMEL = 4096  # smaller params keep FP32 moments: 0.1 % of a model's state, but often its norms


def dtype_of(option: torch.dtype | str) -> torch.dtype:
    """The dtype of moments with this `state_dtype`."""
    return CODES if isinstance(option, str) else option


def takes_codes(param: torch.Tensor) -> bool:
    """Whether the moments of a param are kept in 8 bits: the same on all ranks of a DTensor."""
    return param.numel() >= _MIN_NUMEL and param.dtype != torch.float64


def _kind(moment: str) -> state8.Codes:
    return state8.UNSIGNED if moment == "exp_avg_sq" else state8.SIGNED


def create(param: torch.Tensor, moment: str) -> dict[str, torch.Tensor]:
    """The two entries of a moment that is zero."""
    count, device = state8.blocks(local(param).numel()), param.device
    scale = torch.zeros(count, dtype=torch.float32, device=device)
    return {moment: torch.zeros_like(param, dtype=CODES), moment + SUFFIX: scale}


def encode(param: torch.Tensor, moment: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The two entries of a moment with these values, rounded to nearest."""
    entries = create(param, moment)
    codes, scale = state8.encode(local(values).float(), _kind(moment))
    local(entries[moment]).copy_(codes)
    entries[moment + SUFFIX].copy_(scale)
    return entries


def decode(moment: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values, in FP32."""
    values = torch.zeros_like(codes, dtype=torch.float32)
    local(values).copy_(state8.decode(local(codes), scale, _kind(moment)))
    return values


def decoded(state: dict[str, Any], moments: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The state of a param with moments in `dtype` instead of codes."""
    result = dict(state)
    for name in _of_codes(state, moments):
        result[name] = decode(name, state[name], result.pop(name + SUFFIX)).to(dtype)
    return result


def widened(state: dict[str, Any], moments: tuple[str, ...]) -> dict[str, Any]:
    """The state with moments in FP32 instead of codes or BF16."""
    state = decoded(state, moments, torch.float32)
    narrow = (n for n in moments if n in state and state[n].dtype == torch.bfloat16)
    return {**state, **{name: state[name].float() for name in narrow}}


def portable(state: dict[str, Any], moments: tuple[str, ...]) -> dict[str, Any]:
    """A state to save: the codes of a DTensor as BF16, since other ranks would cut other blocks."""
    sharded = any(is_sharded(state[name]) for name in _of_codes(state, moments))
    return decoded(state, moments, torch.bfloat16) if sharded else state


def _of_codes(state: dict[str, Any], moments: tuple[str, ...]) -> list[str]:
    return [name for name in moments if name + SUFFIX in state]


def restored(
    who: str, param: torch.Tensor, moment: str, saved: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A moment to load that is in 8 bits in the checkpoint or here, where it has `dtype`."""
    values = saved[moment]
    if getattr(values, "dtype", None) != CODES:
        values = checked(who, moment, param, values, torch.float32, LOW_PRECISION)
        return encode(param, moment, values)
    codes = checked(who, moment, param, values, CODES, ())
    scale: Any = saved.get(moment + SUFFIX)
    wanted = (state8.blocks(local(codes).numel()),)
    is_tensor = isinstance(scale, torch.Tensor)
    if not is_tensor or scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        got = f"{short(scale.dtype)} {tuple(scale.shape)}" if is_tensor else scale
        raise ValueError(
            f"{who}: {moment}{SUFFIX} must be float32 of shape {wanted}, one per {state8.BLOCK} "
            f"elements of {moment}, got {got}"
        )
    scale = scale.detach().to(param.device, copy=True)
    if dtype == CODES:
        return {moment: codes, moment + SUFFIX: scale}
    return {moment: decode(moment, codes, scale).to(dtype)}
