"""unscale_, grad_stats_, and the ops of a few scalars, by the rules of tests/independent.py."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from definitions_casts import filled, fp32

F32 = np.float32


def note(
    grads: list[torch.Tensor], factor: float | None, found_inf: torch.Tensor,
    counts: torch.Tensor | None, rounded: bool,
) -> None:  # fmt: skip
    kinds = [ind.grad_counts(g, factor, rounded) for g in grads]
    if any(inf or nan for inf, nan, *_ in kinds):
        found_inf.fill_(1.0)
    if counts is not None:
        counts.copy_(torch.tensor(kinds, dtype=torch.int64).view(-1, 4))


def unscale_(
    grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:  # fmt: skip
    note(grads, inv_scale.item(), found_inf, counts, rounded=True)
    for grad in grads:
        grad.copy_(filled(ind.unscale(grad, inv_scale.item())[0], grad.dtype))


def grad_stats_(
    grads: list[torch.Tensor], inv_scale: torch.Tensor | None, found_inf: torch.Tensor,
    sum_sq: torch.Tensor, counts: torch.Tensor | None,
) -> None:  # fmt: skip
    factor = None if inv_scale is None else inv_scale.item()
    note(grads, factor, found_inf, counts, rounded=False)
    for i, grad in enumerate(grads):
        with np.errstate(all="ignore"):
            try:
                sum_sq[i] = ind.sum_of_squares([grad], factor)
            except OverflowError:
                sum_sq[i] = math.inf


def scale_from_amax_(
    scale: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype,
    margin: int, two: bool,
) -> None:  # fmt: skip
    pairs, most = zip(ind.values(amax).flat, ind.values(scale).flat, strict=True), ind.BY_DTYPE
    scales = [ind.scale_of(a, most[dtype].max, margin, two, previous=s) for a, s in pairs]
    want = np.array(scales, F32).reshape(tuple(scale.shape))
    scale.copy_(fp32(want))
    scale_inv.copy_(fp32(F32(1) / want))


@np.errstate(all="ignore")
def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    return fp32(F32(1) / ind.values(scale).astype(F32))


@np.errstate(all="ignore")
def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    norm = np.sqrt(np.float64(math.fsum(ind.values(sum_sq).flat)))
    return fp32(np.minimum(1.0, max_norm / (norm + 1e-6)))


@np.errstate(all="ignore")
def update_scale_(
    scale: torch.Tensor, growth: torch.Tensor, left: torch.Tensor, counters: torch.Tensor,
    found_inf: torch.Tensor, underflow: torch.Tensor | None, growth_factor: float,
    backoff_factor: float, interval: int, min_scale: float, max_scale: float, hysteresis: int,
    grow_on_underflow: float,
) -> None:  # fmt: skip
    now, hit = scale.item(), found_inf.item() != 0
    skipped, applied, in_a_row = counters.tolist()
    counters.copy_(torch.tensor([skipped + hit, applied + (not hit), in_a_row + 1 if hit else 0]))
    if hit:
        growth.zero_()
        left.copy_((left - 1).clamp(min=0))
        if left == 0:
            lower = np.maximum(np.float64(F32(now * backoff_factor)), min_scale)
            scale.fill_(np.minimum(now, lower))
        return
    early = underflow is not None and underflow.item() > F32(grow_on_underflow)
    growth += 1
    if growth.item() >= interval / (20 if early else 1):
        higher = np.minimum(np.float64(F32(now * growth_factor)), max_scale)
        if np.isfinite(higher):
            scale.fill_(np.maximum(now, higher))
        growth.zero_()
        left.fill_(hysteresis)
