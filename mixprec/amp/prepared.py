"""Optimizers that Accelerate prepared, given to a scaler that Accelerate does not know."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .optimizers import params_of

_ATTACH = "use mixprec.integrations.accelerate.attach(accelerator, scaler) before prepare"


def unwrap(who: str, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper; any other optimizer itself. ValueError where
    Accelerate still accumulates gradients: unscaled and scaled ones would be added."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if wrapper is None or not isinstance(optimizer, wrapper):
        return optimizer
    if not optimizer.gradient_state.sync_gradients:
        raise ValueError(
            f"{who}: optimizer must have added up its gradients, got one of Accelerate with "
            f"sync_gradients=False: {_ATTACH}"
        )
    return optimizer.optimizer if type(optimizer) is wrapper else optimizer


class UnscalesPrepared(torch.amp.GradScaler):
    """torch's scaler, whose unscale_ takes prepared optimizers too."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(unwrap("GradScaler.unscale_", optimizer) if self._enabled else optimizer)


def step_prepared(scaler: Any, given: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """scaler.step(optimizer); `given`, which wraps it, then knows whether the step was skipped."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY and not scaler._warned_clipped:
        scaler._warned_clipped = _warn_if_clipped(given, optimizer)
    result = scaler.step(optimizer, *args, **kwargs)
    given._is_overflow = any(bool(flag) for flag in state["found_inf_per_device"].values())
    return result


def _warn_if_clipped(given: Any, optimizer: Any) -> bool:
    """Warn where the gradients, which are scaled, were written once more than they were added up,
    as accelerator.clip_grad_norm_ does; return whether."""
    if dist.is_available() and dist.is_initialized():
        return False  # DDP writes them too
    adds = given.gradient_state.num_steps
    if all(p.grad is None or p.grad._version < adds for p in params_of(optimizer)):
        return False
    warnings.warn(
        "GradScaler.step: gradients were changed while they were scaled; accelerator.clip_grad_"
        f"norm_ and clip_grad_value_ clip scaled ones, by far too much: {_ATTACH}",
        stacklevel=6,  # the caller of step, beyond two frames of _disable_dynamo
    )
    return True
