"""The training loops that trainers have to equal bit for bit, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import mixprec

STEPS = 50
# Scales that depend on all steps before, and change the bits of every product.
DELAYED = replace(mixprec.Recipe.parse("fp8-delayed"), history=STEPS, power_of_two_scale=False)
FP16, BF16 = mixprec.Recipe.parse("fp16"), mixprec.Recipe.parse("bf16")
GROWS = {"init_scale": 2.0**8, "growth_interval": 7}
INF = 13  # the batch with an Inf


@dataclass(frozen=True)
class Case:
    """A way to train: `clip` are the arguments that make the optimizer clip."""

    recipe: mixprec.Recipe
    params: torch.dtype | None = None
    clip: dict[str, float] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    accumulate: int = 1

    def __str__(self) -> str:
        params = str(self.params or torch.float32).removeprefix("torch.")
        return f"{self.recipe.name}-{params}-{'-'.join(self.clip)}-{self.accumulate}"

    def make_scaler(self) -> mixprec.GradScaler | None:
        return None if self.scaler is None else mixprec.GradScaler(**self.scaler)


CASES = [
    Case(DELAYED, torch.bfloat16, {"max_grad_norm": 0.5}, accumulate=2),
    Case(FP16, torch.float16, {"max_grad_value": 0.01}, GROWS),
    Case(BF16, None, {"max_grad_norm": 0.5}),
]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(count: int, inf: int | None = INF) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets that 16 bits hold exactly: it does not matter who casts them."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-16, 17, (count, 8, 16), generator=generator) / 8
    y = torch.randint(-16, 17, (count, 8, 4), generator=generator) / 8
    if inf is not None:
        x[inf, 0, 0] = torch.inf
    return list(zip(x, y, strict=True))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).square().mean()


def optimizer_and_scheduler(params: Any, **clip: float) -> tuple[Any, Any]:
    optimizer = mixprec.optim.AdamW(params, lr=1e-2, **clip)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 10))


def state(model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, Any]:
    """Everything that the next step depends on."""
    return {
        "params": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "optimizer": optimizer.state_dict()["state"],
        "lr": scheduler.get_last_lr(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def train(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """The loop as README has it."""
    model = mixprec.convert(network(), case.recipe)
    if case.params is not None:
        model = mixprec.cast_parameters(model, case.params)
    optimizer, scheduler = optimizer_and_scheduler(model.parameters(), **case.clip)
    scaler = case.make_scaler()
    data = batches(steps * case.accumulate)
    for i, (x, y) in enumerate(data):
        loss = loss_of(model(x.to(case.params or x.dtype)), y) / case.accumulate
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (i + 1) % case.accumulate:
            continue
        before = [p.detach().clone() for p in model.parameters()]
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        skipped = optimizer.last_step_skipped
        assert skipped == (i // case.accumulate == INF // case.accumulate)
        assert all(map(torch.equal, before, model.parameters())) == skipped
        if not skipped:
            scheduler.step()
        optimizer.zero_grad()
    return state(model, optimizer, scheduler, scaler)
