"""A training run that overflows a hundred times in a row recovers as if it never had."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import name, normal
from optimizers import assert_same, copies, tensors
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, AdamW, Muon

MIN_SCALE = 2.0**-24
# tests/training/test_optim_skipping.py has single steps of every kind.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
    "muon": (Muon, {}),
    "stochastic": (AdamW, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}),
}


class Run:
    """A model in training, and one step as users write it."""

    def __init__(self, dtype: torch.dtype, kind: str, **scaler: Any) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        self.params = list(self.model.parameters())
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.02}]
        make, settings = KINDS[kind]
        self.optimizer = make(groups, lr=0.01, max_grad_norm=1.0, **settings)
        self.scaler = GradScaler(init_scale=2.0**16, growth_interval=2, **scaler)

    def step(self, step: int, *bad: tuple[int, int, float]) -> float:
        """bad: (param, element, value) written into the scaled gradients."""
        x = normal((8, 6), self.dtype, seed=step)
        y = normal((8, 3), torch.float32, seed=5)
        self.optimizer.zero_grad()
        loss = (self.model(x).float() - y).square().mean()
        self.scaler.scale(loss).backward()
        for param, element, value in bad:
            self.params[param].grad.view(-1)[element] = value
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_120_overflows_reach_the_minimum_scale_and_pass(dtype: torch.dtype, kind: str) -> None:
    """And one in the first step of all: compared with a run without any."""
    calls: list[Any] = []
    watch = {"max_consecutive_skips": 40, "on_max_skips": calls.append}
    run, calm = (Run(dtype, kind, **watch) for _ in range(2))
    run.step(0, (0, 0, math.nan))
    assert all(torch.equal(p, q) for p, q in zip(run.params, calm.params, strict=True))
    for s in run.optimizer.state.values():
        assert not any(s[key].any() for key in s.keys() - {"master"})
    for step in range(3):
        run.step(step)
        calm.step(step)
    before = copies(run.optimizer, run.params)
    for step in range(120):
        run.step(step, (step % 4, -1, math.inf if step % 2 else math.nan))
        assert run.scaler.get_scale() >= MIN_SCALE
        assert run.scaler.last_step_skipped
    assert_same(tensors(run.optimizer, run.params), before)
    assert run.scaler.get_scale() == MIN_SCALE
    assert run.scaler.skipped.item() == run.optimizer.skipped.item() == 121
    assert [[(each.inf, each.nan) for each in report] for report in calls] == [[(1, 0)]] * 3
    losses = [(run.step(step), calm.step(step)) for step in range(3, 71)]
    assert run.scaler.get_scale() == 2.0**10
    assert run.scaler.skipped.item() == 121
    assert all(t.isfinite().all() for t in tensors(run.optimizer, run.params))
    if dtype == torch.float16:  # gradients vanish at such a scale, until it has grown again
        stormy, calmed = (sum(column[-20:]) for column in zip(*losses, strict=True))
        assert stormy < 1.1 * calmed
    else:  # powers of two in between leave no trace
        assert_same(tensors(run.optimizer, run.params), tensors(calm.optimizer, calm.params))
