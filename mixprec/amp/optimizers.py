"""Queries of a GradScaler to an optimizer of torch or mixprec."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer of mixprec involves this rank only."""
    return optimizer.ranks.alone(params_of(optimizer))  # type: ignore[attr-defined]


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
