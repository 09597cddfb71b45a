"""Warn where optimizer.step() uses scaled gradients, in place of scaler.step(optimizer)."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _scaled_losses
from .optimizers import params_of, unscales_itself

_TORCHS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_fine: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of a scaler, or looked at
_probes: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Probe] = weakref.WeakKeyDictionary()
_hooked = False


class _Probe:
    """A hook of one parameter: whether its gradient is as a backward pass from a scaled loss left
    it. Where it was written since, as by clipping or unscaling by hand, that is not known."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = weakref.ref(param)
        self.scaled: tuple[int, int] | None = None
        self.handle = param.register_post_accumulate_grad_hook(self)

    def __call__(self, param: torch.Tensor) -> None:
        is_scaled = _scaled_losses.is_scaled(torch._C._current_graph_task_id())
        self.scaled = _identity(param) if is_scaled else None

    def is_scaled(self) -> bool:
        param = self.param()
        return param is not None and self.scaled is not None and self.scaled == _identity(param)


def _identity(param: torch.Tensor) -> tuple[int, int] | None:
    return None if param.grad is None else (id(param.grad), param.grad._version)


def watch() -> None:
    """Look at all steps from here on: a scaler has scaled a loss."""
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def is_fine(optimizer: torch.optim.Optimizer) -> None:
    """A scaler unscales its gradients."""
    _fine.add(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """At an optimizer's first step that no scaler makes, set a probe; at the next one, ask it. No
    gradient is read."""
    if torch.compiler.is_compiling() or optimizer in _fine:
        return
    if type(optimizer) not in _TORCHS and not unscales_itself(optimizer):
        return  # which may unscale by itself
    probe = _probes.get(optimizer)
    if probe is None:
        found = (p for p in params_of(optimizer) if p.grad is not None and p.is_leaf)
        if (param := next(found, None)) is not None:
            _scaled_losses.start()
            _probes[optimizer] = _Probe(param)
        return
    probe.handle.remove()
    _fine.add(optimizer)
    if probe.is_scaled():
        name = type(optimizer).__name__
        warnings.warn(
            f"{name}.step() uses gradients of a loss that GradScaler.scale has multiplied: call "
            "scaler.step(optimizer), which divides them and skips Inf and NaN, and then "
            "scaler.update(), in place of optimizer.step()",
            stacklevel=4,
        )
