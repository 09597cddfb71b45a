"""Check one tensor of a state to load."""

from __future__ import annotations

from typing import Any

import torch

from .._local_gradients import is_sharded


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
