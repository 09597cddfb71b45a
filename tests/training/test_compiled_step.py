"""torch.compile of a whole training step: what reads gradients stays outside of the graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import normal
from torch import nn

import mixprec
from mixprec.optim import SGD, Adam, AdamW, Lion, Muon


class Run:
    def __init__(self, recipe: str, scaled: bool, kind: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        dtype = torch.float16 if recipe == "fp16" else torch.bfloat16
        self.model = mixprec.cast_parameters(mixprec.convert(layers, recipe), dtype)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, max_grad_norm=1.0)
        self.scaler = mixprec.GradScaler("cpu", 2.0**10, growth_interval=2, enabled=scaled)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mixprec.update_scales(self.model)
        return loss

    def everything(self) -> list[Any]:
        states = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.model.state_dict().values(), *states, self.scaler.get_scale()]


@pytest.mark.parametrize(
    ("recipe", "scaled", "kind"),
    [
        ("fp16", True, AdamW),
        ("fp8-delayed", False, Adam),
        *(("bf16", False, kind) for kind in (SGD, Lion, Muon)),
    ],
)
def test_a_compiled_train_step_gives_the_bits_of_an_eager_one(
    recipe: str, scaled: bool, kind: type[torch.optim.Optimizer]
) -> None:
    runs = [Run(recipe, scaled, kind) for _ in range(2)]
    steps = [runs[0].step, torch.compile(runs[1].step, backend="aot_eager")]
    for i in range(4):
        x = normal((4, 16), next(runs[0].model.parameters()).dtype, seed=i)
        x[0, 0] = math.inf if i == 1 else x[0, 0]
        losses = [step(x) for step in steps]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    torch.testing.assert_close(*(run.everything() for run in runs), rtol=0, atol=0)
    assert all(int(run.optimizer.skipped) == 1 for run in runs)
