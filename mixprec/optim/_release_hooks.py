"""The hooks that update a param in backward, and the params that cannot have one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _local_gradients
from .._local_gradients import is_sharded

if TYPE_CHECKING:
    from ._base import Optimizer


class ReleasedGradient(torch.Tensor):
    """A tensor without memory in place of a gradient; RuntimeError for each operation on it.

    It has the gradient's shape, dtype and device, so that nobody takes it for no gradient: clipping
    by hand, unscaling, another optimizer's step and autograd, which would add to it, all raise.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradient: torch.Tensor) -> ReleasedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.shape,
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
            storage_size=0,
        )

    @classmethod
    def __torch_dispatch__(cls, op: Any, *_: Any) -> None:
        raise RuntimeError(
            f"release_gradients=True: {op} needs a gradient that its optimizer has applied in "
            "backward and freed: it cannot be read, clipped, unscaled or added to (no accumulation "
            "over several backward passes) before the next step() or zero_grad()"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def is_released(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is ReleasedGradient


class Hook:
    """The hook of the params of an optimizer, which it does not keep alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer()

    def __call__(self, param: torch.Tensor) -> None:
        optimizer = self.optimizer
        # Autograd calls it for an undefined gradient too.
        if optimizer is None or param.grad is None or is_released(param.grad):
            return
        assert optimizer._releases is not None, "else there is no hook"
        optimizer._releases.in_backward(param)


def watch(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Register the hook where it is needed and not yet there: a frozen param gets it when it is no
    longer."""
    mine = Hook(optimizer)
    _local_gradients.start()
    for p in params:
        theirs = (hook.optimizer for hook in _hooks(p) if isinstance(hook, Hook))
        if p.requires_grad and not any(other is optimizer for other in theirs):
            p.register_post_accumulate_grad_hook(mine)


def check(who: str, optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    """ValueError if a param cannot be updated in backward, or another optimizer does it there."""
    for p in params:
        for hook in _hooks(p):
            if isinstance(hook, Hook) and hook.optimizer not in (None, optimizer):
                raise ValueError(
                    f"{who}: params must not be those of an optimizer with release_gradients=True, "
                    f"got one of shape {tuple(p.shape)} that {type(hook.optimizer).__name__} "
                    "updates in backward"
                )
    if optimizer._release_gradients and (reason := refusal(params)):
        raise ValueError(f"{who}: {reason}")


def refusal(params: Iterable[torch.Tensor]) -> str | None:
    """Why these params cannot be updated in backward; None if they can."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return (
            f"release_gradients must be False with several ranks, got {dist.get_world_size()}: "
            "their gradients are averaged after they would have been applied"
        )
    storages: set[int] = set()
    for p in params:
        if torch._C._has_storage(p) and p.numel() > 0:
            if (storage := p.untyped_storage()._cdata) in storages:
                return "release_gradients must be False for params that share a storage"
            storages.add(storage)
        if is_sharded(p):
            return "release_gradients must be False for DTensors (FSDP2, tensor parallelism)"
        if getattr(p, "main_grad", None) is not None:
            return "release_gradients must be False for params with main_grad, which is not freed"
        if any(not isinstance(hook, Hook) for hook in _hooks(p)):
            return (
                "release_gradients must be False for params with other hooks by register_post_"
                "accumulate_grad_hook, which would find the gradient freed, or have it changed late"
            )
    return None


def other_hooks(p: torch.Tensor, optimizer: object) -> list[Any]:
    """Those that are not this optimizer's, nor of one that is gone."""
    mine = (None, optimizer)
    return [h for h in _hooks(p) if not isinstance(h, Hook) or h.optimizer not in mine]


def _hooks(p: torch.Tensor) -> list[Any]:
    return list((p._post_accumulate_grad_hooks or {}).values())
