"""The norms of all gradients, and whether they are finite, read before a step."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed import Ranks
from ..grad_report import GradCounts
from ..ops import clip_coef, grad_stats_
from ._batches import Batch


def on(device: torch.device, scalar: torch.Tensor | None) -> torch.Tensor | None:
    return None if scalar is None else scalar.to(device, non_blocking=True)


def read(
    batches: list[Batch],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    counts: GradCounts | None,
) -> dict[int, torch.Tensor]:
    """Read all gradients once: set `found_inf` (fp32, one element, on any device) in place, and
    return, by group, fp64 squared norms on found_inf's device, whose sum is the group's."""
    home = found_inf.device
    by_device: dict[torch.device, list[Batch]] = {}
    for batch in batches:
        by_device.setdefault(batch.device, []).append(batch)
    sums: dict[int, torch.Tensor] = {}
    for device, here in by_device.items():
        grads = [g for batch in here for g in batch.grads]
        flag = found_inf if device == home else torch.zeros_like(found_inf, device=device)
        sum_sq = torch.zeros(len(grads), dtype=torch.float64, device=device)
        params = [p for batch in here for p in batch.params]
        whole = all(batch.data is batch.params for batch in here)
        elements = None if whole else [grad.numel() for grad in grads]
        table = None if counts is None else counts.table(device, params, elements)
        grad_stats_(grads, on(device, inv_scale), flag, sum_sq, table)
        if device != home:
            found_inf.masked_fill_((flag != 0).to(home, non_blocking=True), 1.0)
            sum_sq = sum_sq.to(home, non_blocking=True)
        sizes = [len(batch.grads) for batch in here]
        parts = sum_sq.split(sizes) if len(sizes) > 1 else (sum_sq,)
        for batch, part in zip(here, parts, strict=True):
            before = sums.get(batch.group)
            sums[batch.group] = part if before is None else torch.cat([before, part])
    return sums


def agree(
    ranks: Ranks,
    batches: list[Batch],
    found_inf: torch.Tensor,
    sums: dict[int, torch.Tensor],
    groups: list[dict[str, Any]],
) -> dict[int, torch.Tensor]:
    """Reduce the flag and the squared norms of each group over all ranks that share the params.

    sums: of this rank, from `read`; a rank may have no gradient of a group, or none at all.
    """
    order = sorted(sums)
    params = [p for g in order for b in batches if b.group == g for p in b.params]
    home = found_inf.device
    none = torch.zeros(0, dtype=torch.float64, device=home)
    mine = torch.cat([sums[g] for g in order]) if sums else none
    scopes = [g for g in order for _ in range(sums[g].numel())]
    everyone = [p for group in groups for p in group["params"]]
    totals = ranks.agree_(found_inf, mine, params, scopes, len(groups), everyone)
    return {g: totals[g : g + 1] for g in range(len(groups))}


def clip_factors(
    sums: dict[int, torch.Tensor], groups: list[dict[str, Any]], max_grad_norm: float | None
) -> dict[int, torch.Tensor]:
    """By group, the factor that clips its gradients: by its own norm if it has its own limit, else
    by the norm of all groups without one."""
    clips = {}
    rest = []
    for g in sums:
        limit = groups[g].get("max_grad_norm")
        if limit is not None:
            clips[g] = clip_coef(sums[g], limit)
        else:
            rest.append(g)
    if max_grad_norm is not None and rest:
        parts = [sums[g] for g in rest]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        clips |= dict.fromkeys(rest, clip_coef(together, max_grad_norm))
    return clips
