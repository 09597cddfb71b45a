"""How well a plan predicts: the growth of the loss in training runs with random assignments.

    python examples/plan_study.py --out bench/results/cpu/plan-study.json

Each model is trained in FP32, then continued from that checkpoint for 100 steps, once in FP32 and
once with each assignment, on the same batches. Half of the assignments mix formats of 4, 8 and 16
bits in random shares, half have 4 bits in half of the FLOPs. Predicted is the growth of the loss
that mixprec.plan has for the assignment; measured is that of the mean loss over the validation
data, in the formats of the assignment, against the run in FP32.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt_data import Batches, load
from gpt_model import GPT, GPTConfig
from image_data import digit_images
from image_models import ViT
from needs import needs

import mixprec
from mixprec.bench.environment import environment

# Written before the first run.
BEFORE, STEPS, SEEDS, LR = 300, 100, 5, 1e-3
MIXED, EQUAL = 50, 50
FOUR, MORE = ("mxfp4", "nvfp4-1x16"), ("mxfp8", "fp8", "bf16")
SHARE = 0.5  # of the FLOPs in 4 bits, of the second half

Batch = tuple[torch.Tensor, ...]


class WithLoss(torch.nn.Module):
    """A model of images, which returns the loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), labels)


class Teacher(torch.nn.Module):
    """An MLP that learns the outputs of another one, of inputs with outliers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 128, 128, 128, 16)
        layers: list[torch.nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(a, b), torch.nn.GELU()]
        self.layers = torch.nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def gpt() -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    text = load(None, 64)
    train = Batches(text.train, 8, 64, BEFORE + STEPS, seed=0)
    model = GPT(GPTConfig(layers=2, width=96, heads=4, context=64))
    return model, list(train), list(Batches(text.validation, 32, 64, 8, seed=None))


def images() -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    data = digit_images()
    x, y = data.train
    order = torch.Generator().manual_seed(0)
    places = [torch.randint(len(y), (32,), generator=order) for _ in range(BEFORE + STEPS)]
    model = WithLoss(ViT(len(data.classes), data.side, width=64))
    return model, [(x[i], y[i]) for i in places], [data.held_out]


def teacher() -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    torch.manual_seed(1)
    right = Teacher().layers
    with torch.no_grad():
        right[0].weight.mul_(3.0)
        scale = torch.ones(64).index_fill(0, torch.tensor([3, 40]), 10.0)

        def make(rows: int) -> Batch:
            x = torch.randn(rows, 64) * scale
            return x, right(x) + 0.01 * torch.randn(rows, 16)

        batches = [make(64) for _ in range(BEFORE + STEPS)]
        held_out = [make(2048)]
    torch.manual_seed(0)
    return Teacher(), batches, held_out


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "vit": images, "mlp": teacher}


class Task:
    """A model at the checkpoint, and its data."""

    def __init__(self, name: str, before: int = BEFORE) -> None:
        torch.manual_seed(0)
        self.model, batches, self.held_out = MODELS[name]()
        self.after = batches[before : before + STEPS]
        optimizer = self._optimizer(self.model)
        for batch in batches[:before]:
            self._step(self.model, optimizer, batch)
        self.state = copy.deepcopy(optimizer.state_dict())
        self.optimizer = optimizer

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return mixprec.optim.AdamW(model.parameters(), lr=LR)

    def _step(self, model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def plan(self, budget: dict[str, float], formats: tuple[str, ...] = FOUR + MORE) -> Any:
        return mixprec.plan(
            self.model, self.after[:8], budget=budget, formats=formats, optimizer=self.optimizer,
            steps=len(self.after),
        )  # fmt: skip

    def run(self, plan: Any, seed: int = 0) -> float:
        """The validation loss after the steps; None: in FP32."""
        model = copy.deepcopy(self.model)
        if plan is not None:
            plan.apply(model)
        optimizer = self._optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self.state))
        torch.manual_seed(seed)
        for batch in self.after:
            self._step(model, optimizer, batch)
        with torch.no_grad():
            losses = [float(model(*batch)) for batch in self.held_out]
        return sum(losses) / len(losses)


def assignments(plan: Any, draws: random.Random, mixed: int, equal: int) -> list[dict[str, Any]]:
    """Of the products of a plan, with their shares of FLOPs in 4 bits."""
    products = [(n, p, row["flops"]) for n, row in plan.measured.items() for p in row["harm"]]
    total, found = sum(flops for *_, flops in products), []
    for i in range(mixed + equal):
        share = draws.random() if i < mixed else SHARE
        chosen: dict[str, dict[str, str]] = {name: {} for name in plan.measured}
        used = 0.0
        for name, product, flops in draws.sample(products, len(products)):
            four = draws.random() < share if i < mixed else used + flops / 2 <= share * total
            used += flops * four
            chosen[name][product] = draws.choice(FOUR if four else MORE)
        bits = {name: 4 if name in FOUR else 16 if name == "bf16" else 8 for name in FOUR + MORE}
        low = sum(f * (1 - bits[chosen[n][p]] / 16) for n, p, f in products) / total
        found.append({"kind": "mixed" if i < mixed else "equal", "recipes": chosen, "low": low})
    return found


def study(name: str, mixed: int, equal: int, seeds: int, before: int = BEFORE) -> dict[str, Any]:
    task = Task(name, before)
    plan = task.plan({"loss": 1e9})
    program = plan.program()
    exact = task.run(None)
    rows = assignments(plan, random.Random(0), mixed, equal)
    for row in rows:
        chosen = row["recipes"]
        row["predicted"] = program.value("loss", chosen)
        row["measured"] = task.run(plan.replaced(chosen)) - exact
    # What another seed of stochastic rounding changes, of the first assignments of both kinds.
    again = [*rows[:2], *rows[mixed : mixed + 2]]
    noise = [
        [task.run(plan.replaced(row["recipes"]), seed) - exact for seed in range(seeds)]
        for row in again
    ]
    return {"fp32": exact, "rows": rows, "noise": noise, "measured": plan.measured}


def spearman(rows: list[dict[str, Any]], key: str) -> tuple[float, float, float]:
    """The rank correlation of `key` with what was measured, and its 95% interval (bootstrap)."""
    with needs("scipy"):
        from scipy.stats import spearmanr
    pairs = [(row[key], row["measured"]) for row in rows]
    draws = random.Random(0)
    values = sorted(
        float(spearmanr(*zip(*draws.choices(pairs, k=len(pairs)), strict=True)).statistic)
        for _ in range(1000)
    )
    return float(spearmanr(*zip(*pairs, strict=True)).statistic), values[25], values[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    given = parser.parse_args()
    report: dict[str, Any] = {"models": {}, "environment": environment(quick=False)}
    for name in given.models:
        start = time.perf_counter()
        found = report["models"][name] = study(name, MIXED, EQUAL, SEEDS)
        for kind in ("mixed", "equal"):
            rows = [row for row in found["rows"] if row["kind"] == kind]
            spread = sorted(row["measured"] for row in rows)
            print(f"{name:5} {kind:6} loss {spread[0]:+.4f} to {spread[-1]:+.4f}", end="")
            for key in ("predicted", "low"):
                value, low, high = spearman(rows, key)
                print(f"  {key} {value:.2f} ({low:.2f} to {high:.2f})", end="")
            print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        print("      noise", [f"{min(n):+.4f} to {max(n):+.4f}" for n in found["noise"]])
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
