"""A training run with everything that a checkpoint holds, and what a refused load must leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases import normal
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from mixprec.amp.grad_scaler import GradScaler
from mixprec.checkpoint import load_checkpoint
from mixprec.optim import AdamW

STEPS, OVERFLOW = 6, 3
PARTS = ("model", "optimizer", "scaler", "lr_scheduler")
NOTHING: dict[str, None] = dict.fromkeys(PARTS)


def seed_all(seed: int) -> None:
    for of in (torch.manual_seed, random.seed, numpy.random.seed):
        of(seed)


class Run:
    """A training run with everything that has a state, and one step as users write it."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        kind: Callable[..., torch.optim.Optimizer] = AdamW,
        scales: Callable[..., torch.amp.GradScaler] = GradScaler,
        init: int = 0,
        **options: Any,
    ) -> None:
        seed_all(init)
        self.dtype = dtype
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        ).to(dtype)
        params = list(self.model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
        self.optimizer = kind(groups, lr=0.01, **options)
        self.scaler = scales(init_scale=2.0**10, growth_interval=2)
        schedules = [LinearLR(self.optimizer), CosineAnnealingLR(self.optimizer, T_max=4)]
        self.lr_scheduler = SequentialLR(self.optimizer, schedules, milestones=[2])

    def step(self, step: int) -> None:
        x = normal((8, 6), self.dtype, seed=step)
        x = x * random.gauss(1.0, 0.1) * float(numpy.random.normal(1.0, 0.1))  # augmentation
        loss = (self.model(x).float() - normal((8, 3), torch.float32, seed=5)).square().mean()
        self.scaler.scale(loss).backward()
        if step == OVERFLOW:
            self.optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {part: getattr(self, part) for part in PARTS}

    def bits(self) -> Any:
        """All of the state, random generators included, with tensors as their bytes."""
        states = {part: value.state_dict() for part, value in self.parts().items()}
        generators = [random.getstate(), numpy.random.get_state()[1].tolist()]
        return as_bytes([states, torch.get_rng_state(), generators])


def as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bytes(item) for key, item in value.items()}
    return [as_bytes(item) for item in value] if isinstance(value, (list, tuple)) else value


def refused(path: Path, message: str, run: Run, **arguments: Any) -> None:
    """load_checkpoint raises one ValueError with the path and `message`, and changes no bit."""
    before = run.bits()
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(path, **{**run.parts(), **arguments})
    assert str(caught.value).startswith(f"load_checkpoint: {path}")
    assert run.bits() == before


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Write the file again with `change` made to its content."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
