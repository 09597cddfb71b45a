"""What a GradScaler asks of an optimizer of torch, of mixprec, or prepared by Accelerate."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .._local_gradients import gradient_of, local


def any_flag(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag on `device`, 0.0 or 1.0: whether any is not 0 (Inf and NaN are not)."""
    here = [flag.reshape(()).to(device, non_blocking=True) for flag in flags]
    return (here[0] != 0 if len(here) == 1 else torch.stack(here).any()).float()


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of mixprec, whose step unscales, checks and skips."""
    return hasattr(optimizer, "_step_scaled")


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None or gradient_of(p) is not None:
                return True
    return False


def has_fp16_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Of an optimizer of mixprec."""
    grads = map(gradient_of, params_of(optimizer))
    return any(grad is not None and grad.dtype == torch.float16 for grad in grads)


def steps_locally(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer of mixprec involves this rank only."""
    return optimizer.ranks.is_local(params_of(optimizer))  # type: ignore[attr-defined]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(
    optimizer: torch.optim.Optimizer, *, allow_fp16: bool
) -> dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """By device, the optimizer's params that have gradients, and these gradients (the values of a
    sparse one, the part on this rank of a DTensor). ValueError for fp16 ones unless allow_fp16."""
    per_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    ours = unscales_itself(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = gradient_of(p) if ours else p.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. torch's optimizers cannot use them; "
                    "those of mixprec.optim unscale them in FP32"
                )
            if grad.is_sparse:
                if grad.dtype == torch.float16:
                    # Coalesce first: adding up entries of the same index can overflow.
                    grad = p.grad = grad.coalesce()
                grad = grad._values()
            params, grads = per_device.setdefault(grad.device, ([], []))
            params.append(p)
            grads.append(local(grad))
    return per_device


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
