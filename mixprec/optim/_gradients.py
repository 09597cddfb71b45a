"""What a step must know of all its gradients before it may write: are they finite, how large."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import clip_coef, grad_stats_


class Scalars(NamedTuple):
    """What the update kernels read on one device; None stands for 1, 1 and "do not skip"."""

    inv_scale: torch.Tensor | None
    clip: torch.Tensor | None
    found_inf: torch.Tensor | None


def _on(device: torch.device, scalar: torch.Tensor | None) -> torch.Tensor | None:
    return None if scalar is None else scalar.to(device, non_blocking=True)


def scalars_per_device(
    grads: dict[torch.device, list[torch.Tensor]],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    max_norm: float | None,
    read: bool,
) -> dict[torch.device, Scalars]:
    """If `read`, pass once over all gradients; then everything the update needs, per device.

    The pass raises `found_inf` (fp32, one element, on any device) in place and, with max_norm,
    gives the one factor that clips the norm of all gradients together.
    """
    clip = None
    if read:
        assert found_inf is not None, "a flag to raise"
        home = found_inf.device
        sums = []
        for device, tensors in grads.items():
            here = device == home
            flag = found_inf if here else torch.zeros((), device=device)
            sum_sq = torch.zeros((), dtype=torch.float64, device=device)
            grad_stats_(tensors, _on(device, inv_scale), flag, sum_sq)
            sums.append(sum_sq.to(home, non_blocking=True))
            if not here:
                found_inf.masked_fill_((flag != 0).to(home, non_blocking=True), 1.0)
        if max_norm is not None:
            clip = clip_coef(sums[0] if len(sums) == 1 else torch.stack(sums).sum(), max_norm)
    everywhere = (inv_scale, clip, found_inf)
    return {device: Scalars(*(_on(device, t) for t in everywhere)) for device in grads}
