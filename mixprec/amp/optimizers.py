"""What a GradScaler has to know of an optimizer, of torch or of mixprec."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._local_gradients import gradient_of, local


def any_flag(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag on `device`, 0.0 or 1.0: whether any is not 0 (Inf and NaN are not)."""
    here = [flag.reshape(()).to(device, non_blocking=True) for flag in flags]
    return (here[0] != 0 if len(here) == 1 else torch.stack(here).any()).float()


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(gradient_of(p) is not None for p in params_of(optimizer))


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no other rank waits for an optimizer of mixprec to take part in its step."""
    return optimizer.ranks.alone(params_of(optimizer))  # type: ignore[attr-defined]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(
    optimizer: torch.optim.Optimizer, *, allow_fp16: bool
) -> dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The optimizer's params that have gradients, and those (of a sparse one its values, of a
    DTensor the part on this rank), by device; ValueError for fp16 ones."""
    per_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    ours = getattr(optimizer, "_raises_found_inf", False)
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
                    # Two entries of one index are added here, where it can overflow, so add first.
                    grad = p.grad = grad.coalesce()
                grad = grad._values()
            params, grads = per_device.setdefault(grad.device, ([], []))
            params.append(p)
            grads.append(local(grad))
    return per_device
