"""optimizer.last_step_skipped: what a trainer around the optimizer asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import name
from scalers import INF, NAN, every_way, filled, param, step
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import mixprec

SCALERS = (mixprec.GradScaler, torch.amp.GradScaler, ShardedGradScaler)


@every_way
@pytest.mark.parametrize("kind", [None, *SCALERS], ids=name)
def test_skipped_steps_change_nothing_and_are_known(
    kind: Any, explicit: bool, one_rank: None
) -> None:
    """ShardedGradScaler's found_inf has shape [1], which torch's fused optimizers refuse."""
    p = param(4, dtype=torch.bfloat16)
    optimizer, scale = mixprec.optim.SGD([p], lr=1.0), 4.0
    scaler = kind("cpu", init_scale=scale) if kind else None
    assert not optimizer.last_step_skipped
    for bad in ((), (INF,), (), (NAN,)):
        before = p.detach().clone()
        p.grad = filled((4,), *bad, dtype=p.dtype)
        if scaler is None:
            optimizer.step()
        else:
            step(scaler, optimizer, explicit)
            scale *= 0.5 if bad else 1.0
            assert scaler.get_scale() == scale
        assert optimizer.last_step_skipped == bool(bad)
        assert torch.equal(p, before) == bool(bad)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.last_step_skipped, "a step without gradients was not skipped"
