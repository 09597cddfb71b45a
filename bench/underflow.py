"""What loss scaling is for: a task whose gradients fp16 cannot hold, trained with it and without.

A regression in small units: the gradient of a mean over many small errors is far smaller than the
errors themselves, and fp16 has nothing between 0 and 2^-24.
"""

from __future__ import annotations

import itertools
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import mixprec

from . import pages, plot, results
from .environment import environment
from .table import markdown

RESULT = results.CPU / "underflow.json"
PICTURE = Path("docs/underflow.png")
PAGE = Path("docs/loss_scaling.md")
COMMAND = "python -m mixprec.bench underflow"
BATCH, SIZES = 2048, (16, 64, 64, 32)
UNIT = 2.0**-10  # of the targets: standard deviation
STEPS, WARM_UP, SEED, LEARNING_RATE = 200, 20, 0, 3e-4


class Run(NamedTuple):
    """One training: the recipe, and whether the loss is scaled."""

    name: str
    dtype: torch.dtype
    scaled: bool


RUNS = (
    Run("fp32", torch.float32, False),
    Run("bf16", torch.bfloat16, False),
    Run("fp16", torch.float16, False),
    Run("fp16, GradScaler", torch.float16, True),
)


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(SEED)
    sizes = list(itertools.pairwise(SIZES))
    hidden = [layer for n, m in sizes[:-1] for layer in (nn.Linear(n, m), nn.GELU())]
    out = nn.Linear(*sizes[-1])
    with torch.no_grad():  # it starts near 0, where the targets are
        out.weight.mul_(UNIT)
        out.bias.zero_()
    model: nn.Module = nn.Sequential(*hidden, out)
    if dtype == torch.float32:
        return model
    recipe = "fp16" if dtype == torch.float16 else "bf16"
    return mixprec.convert(mixprec.cast_parameters(model, dtype), recipe)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the targets: a smooth function of x, in small units."""
    generator = torch.Generator().manual_seed(SEED)
    mix = torch.randn(SIZES[0], SIZES[-1], generator=generator) / SIZES[0] ** 0.5
    x = torch.randn(BATCH, SIZES[0], generator=generator.manual_seed(1000 + step))
    return x, UNIT * torch.tanh(x @ mix)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error, in FP32."""
    return (model(x).float() - y).square().mean()


def flushed(model: nn.Module, twin: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of gradient elements that are 0, and are not in the twin, which gets the same
    weights and batch and is FP32 throughout."""
    with torch.no_grad():
        torch._foreach_copy_([*twin.parameters()], [*model.parameters()])
    exact = torch.autograd.grad(loss_of(twin, x, y), list(twin.parameters()))
    lost = total = 0
    for p, e in zip(model.parameters(), exact, strict=True):
        assert p.grad is not None
        lost += int(((p.grad == 0) & (e != 0)).sum())
        total += int((e != 0).sum())
    return lost / total


def train(run: Run, steps: int = STEPS) -> dict[str, Any]:
    model, twin = make_model(run.dtype), make_model(torch.float32)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-12, weight_decay=0)
    scaler = mixprec.GradScaler(enabled=run.scaled)
    losses, shares = [], []
    for step in range(steps):
        x, y = make_batch(step)
        warm_up, cool_down = min(1.0, (1 + step) / WARM_UP), 1 - step / steps
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm_up * cool_down
        loss = loss_of(model, x.to(run.dtype), y)
        scaler.scale(loss).backward()
        losses.append(round(loss.item() / UNIT**2, 6))
        shares.append(round(flushed(model, twin, x, y), 6))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "name": run.name,
        "losses": losses,
        "flushed": shares,
        "skipped": int(scaler.skipped) if run.scaled else 0,
        "scale": scaler.get_scale(),
    }


def measure(steps: int = STEPS) -> dict[str, Any]:
    """Losses and shares of every step. The losses are in units of the square of `unit`."""
    where, start = environment(quick=False), time.perf_counter()
    with warnings.catch_warnings():  # that fp16 needs a scaler, which is what is shown
        warnings.filterwarnings("ignore", message=".*fp16 recipe")
        runs = [train(run, steps) for run in RUNS]
    x, y = make_batch(0)
    out = make_model(torch.float32)(x)
    (of_outputs,) = torch.autograd.grad((out - y).square().mean(), out)
    return {
        "environment": where,
        "command": COMMAND,
        "what": f"an MLP of {'-'.join(map(str, SIZES))} units, batches of {BATCH}, AdamW with FP32 "
        f"masters, {steps} steps, seed {SEED}",
        "unit": UNIT,
        "output_gradient": of_outputs.square().mean().sqrt().item(),
        "seconds": round(time.perf_counter() - start, 1),
        "runs": runs,
    }


HEADER = ("run", "first loss", "last loss", "flushed, first step", "flushed, last step", "skipped")


def last(values: list[float]) -> float:
    """The mean of the last twentieth: single batches differ."""
    tail = values[-max(1, len(values) // 20) :]
    return sum(tail) / len(tail)


def block(content: dict[str, Any]) -> str:
    """The table of docs/loss_scaling.md, and where it was measured."""
    body: list[tuple[str, ...]] = []
    for run in content["runs"]:
        losses, shares = run["losses"], run["flushed"]
        ends = f"{losses[0]:.3f}", f"{last(losses):.3f}"
        flushed = f"{shares[0]:.1%}", f"{last(shares):.1%}"
        body.append((run["name"], *ends, *flushed, str(run["skipped"])))
    smallest = content["output_gradient"] / 2.0**-24
    return (
        f"{markdown(HEADER, body)}\n\nLosses in units of the targets' own size squared, the "
        f"last ones a mean over a twentieth of the steps. The gradient of the outputs, root mean "
        f"square, starts at {content['output_gradient']:.1e}, {smallest:.2f} of FP16's smallest "
        f"number. The task: {content['what']}. {pages.machine(content['environment'])}"
    )


def write(root: Path) -> str:
    """Train, write the result, the picture and the table of the page; return the table."""
    content = measure()
    results.write_json(root / RESULT, content)
    plot.underflow(content["runs"], root / PICTURE)
    pages.update(root / PAGE, "underflow", block(content))
    return block(content)
