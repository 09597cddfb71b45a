"""optimizer.last_step_skipped: what a trainer around the optimizer asks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mixprec

BAD = (False, True, True, False)  # the steps whose gradient is Inf


def steps(scaler: Any) -> tuple[list[bool], list[float]]:
    """After each step: whether it was skipped, and the learning rate of a scheduler that asks."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mixprec.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert not optimizer.last_step_skipped
    found, rates = [], []
    for bad in BAD:
        before = p.detach().clone()
        loss = (p * (math.inf if bad else 1.0)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        found.append(optimizer.last_step_skipped)
        assert torch.equal(p, before) == found[-1]
        if not found[-1]:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        optimizer.zero_grad()
    return found, rates


@pytest.mark.parametrize("name", ["none", "mixprec", "torch"])
def test_a_scheduler_stays_where_the_optimizer_stays(name: str) -> None:
    scaler = {
        "none": lambda: None,
        "mixprec": lambda: mixprec.GradScaler("cpu", init_scale=4.0),
        "torch": lambda: torch.amp.GradScaler("cpu", init_scale=4.0),
    }[name]()
    found, rates = steps(scaler)
    assert found == [*BAD]
    assert rates == [0.5, 0.5, 0.5, 0.25]


def test_a_step_without_gradients_was_not_skipped() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mixprec.optim.AdamW([p])
    p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert optimizer.last_step_skipped
    p.grad = None
    optimizer.step()
    assert not optimizer.last_step_skipped
