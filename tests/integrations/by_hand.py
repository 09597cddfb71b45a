"""The training loop that trainers have to equal bit for bit, and what is compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mixprec

STEPS = 50
# Scales that depend on all steps before, and change the bits of every product.
DELAYED = replace(mixprec.Recipe.parse("fp8-delayed"), history=STEPS, power_of_two_scale=False)
FP16, BF16 = mixprec.Recipe.parse("fp16"), mixprec.Recipe.parse("bf16")
GROWS = {"init_scale": 2.0**8, "growth_interval": 7}
INFS = (13, -13)  # the batches with an Inf, in either half
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node=2")


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

    def make_model(self) -> nn.Module:
        model = mixprec.convert(network(), self.recipe)
        return model if self.params is None else mixprec.cast_parameters(model, self.params)

    def make_scaler(self) -> mixprec.GradScaler | None:
        return None if self.scaler is None else mixprec.GradScaler(**self.scaler)

    def loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x.to(self.params or x.dtype)), y)


CASES = [
    Case(DELAYED, torch.bfloat16, {"max_grad_norm": 0.5}, accumulate=2),
    Case(FP16, torch.float16, {"max_grad_value": 0.01}, GROWS),
    Case(BF16, None, {"max_grad_norm": 0.5}),
]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(count: int, infs: tuple[int, ...] = INFS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets that 16 bits hold exactly: it does not matter who casts them."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-16, 17, (count, 8, 16), generator=generator) / 8
    y = torch.randint(-16, 17, (count, 8, 4), generator=generator) / 8
    x[list(infs), 0, 0] = torch.inf
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


def assert_same_bits(got: Any, want: Any, where: str = "") -> None:
    """Of nested states."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_same_bits(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), where
    else:
        assert got == want, where


def loop(
    case: Case, model: nn.Module, data: Any, saved: dict[str, Any] | None = None
) -> tuple[Any, Any, Any, Any, list[float]]:
    """The loop as README has it: model, optimizer, scheduler, scaler, and the norm at each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, scheduler = optimizer_and_scheduler(trained, **case.clip)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    scaler, norms = case.make_scaler(), []
    for first in range(0, len(data), case.accumulate):
        step = data[first : first + case.accumulate]
        for x, y in step:
            loss = case.loss(model, x, y) / case.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        before = [p.detach().clone() for p in trained]
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        skipped = optimizer.last_step_skipped
        assert skipped == any(x.isinf().any() for x, _ in step)
        assert all(map(torch.equal, before, trained)) == skipped
        if "max_grad_norm" in case.clip:
            norms.append(optimizer.grad_norm.float().item())
        if not skipped:
            scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler, scaler, norms


def train(case: Case) -> tuple[dict[str, Any], list[float]]:
    """The state after STEPS steps, and the norms."""
    *parts, norms = loop(case, case.make_model(), batches(STEPS * case.accumulate))
    return state(*parts), norms


def run_program(
    folder: Path, program: str | Path, *arguments: Any, launcher: Iterable[str] = ()
) -> str:
    """What a program prints that is run in `folder`: one of examples/, or of a whole path."""
    command = [sys.executable, *launcher, EXAMPLES / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
