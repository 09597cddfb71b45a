"""Warn where optimizer.step() uses scaled gradients, in place of scaler.step(optimizer)."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .optimizers import params_of, unscales_itself

_TORCHS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_fine: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of a scaler, or looked at
_probes: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Probe] = weakref.WeakKeyDictionary()
_hooked = False


class _Probe:
    """A parameter, and its gradient as the last backward pass from a scaled loss has left it. One
    that was written since, as by clipping or unscaling by hand, is another."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = weakref.ref(param)
        self.scaled: tuple[torch.Tensor | None, int] = None, 0  # kept, so that no other is the same

    def state(self) -> tuple[torch.Tensor | None, int]:
        """Its gradient, which is not read, and how often that was written."""
        grad = getattr(self.param(), "grad", None)
        return grad, 0 if grad is None else grad._version

    def has(self, state: tuple[torch.Tensor | None, int]) -> bool:
        grad, version = self.state()
        return grad is state[0] and version == state[1]


def watch() -> None:
    """Look at all steps from here on: a scaler has scaled a loss."""
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def mark(loss: torch.Tensor) -> None:
    """The loss is scaled: record what backward passes through it leave; not in compiled code."""
    if _probes and loss.requires_grad and not torch.compiler.is_compiling():
        loss.register_hook(_in_backward)


def is_fine(optimizer: torch.optim.Optimizer) -> None:
    """A scaler unscales its gradients."""
    _fine.add(optimizer)


def _in_backward(_: torch.Tensor) -> None:
    before = [(probe, probe.state()) for probe in _probes.values()]

    def after() -> None:
        for probe, state in before:
            if not probe.has(state):
                probe.scaled = probe.state()

    torch.autograd.Variable._execution_engine.queue_callback(after)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """At an optimizer's first step that no scaler makes, set a probe; at the next one, ask it."""
    if torch.compiler.is_compiling() or optimizer in _fine:
        return
    if type(optimizer) not in _TORCHS and not unscales_itself(optimizer):
        return  # which may unscale by itself
    if (probe := _probes.get(optimizer)) is None:
        param = next((p for p in params_of(optimizer) if p.grad is not None), None)
        if param is not None:
            _probes[optimizer] = _Probe(param)
        return
    del _probes[optimizer]
    _fine.add(optimizer)
    if probe.scaled[0] is not None and probe.has(probe.scaled):
        warnings.warn(
            f"{type(optimizer).__name__}.step() uses gradients of a loss that GradScaler.scale has "
            "multiplied: call scaler.step(optimizer), which divides them and skips Inf and NaN, "
            "and then scaler.update(), in place of optimizer.step()",
            stacklevel=4,
        )
