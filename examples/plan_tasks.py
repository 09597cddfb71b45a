"""Models with a checkpoint in the middle of their training, for the studies of mixprec.plan."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt_data import Batches, load
from gpt_model import GPT, GPTConfig
from image_data import digit_images, glyph_images
from image_models import ViT

import mixprec
from mixprec.bench.environment import environment

# Written before the first run.
BEFORE, STEPS, LR = 300, 100, 1e-3

Batch = tuple[torch.Tensor, ...]
Sizes = tuple[int, ...]
SIZES = (64, 128, 128, 128, 16)


class WithLoss(torch.nn.Module):
    """A model of images, which returns the loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), labels)


class Teacher(torch.nn.Module):
    """An MLP that learns the outputs of another one, of inputs with outliers."""

    def __init__(self, sizes: Sizes = SIZES) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(a, b), torch.nn.GELU()]
        self.layers = torch.nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def gpt(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    text = load(None, 64)
    train = Batches(text.train, 8, 64, BEFORE + STEPS, seed)
    model = GPT(GPTConfig(layers=2, width=96, heads=4, context=64))
    return model, list(train), list(Batches(text.validation, 32, 64, 8, seed=None))


def images(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    data = digit_images()
    x, y = data.train
    order = torch.Generator().manual_seed(seed)
    places = [torch.randint(len(y), (32,), generator=order) for _ in range(BEFORE + STEPS)]
    model = WithLoss(ViT(len(data.classes), data.side, width=64))
    return model, [(x[i], y[i]) for i in places], [data.held_out]


def glyphs(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    """Of images that are seen once."""
    data = glyph_images(32 * (BEFORE + STEPS), 2000, seed)
    x, y = data.train
    model = WithLoss(ViT(len(data.classes), data.side, width=64))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train = [(x[i], y[i]) for i in order.split(32)]
    return model, train, [data.held_out]


def teacher(seed: int, sizes: Sizes = SIZES) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    torch.manual_seed(1)
    right = Teacher(sizes).layers
    with torch.no_grad():
        right[0].weight.mul_(3.0)
        scale = torch.ones(64).index_fill(0, torch.tensor([3, 40]), 10.0)

        def make(rows: int) -> Batch:
            x = torch.randn(rows, 64) * scale
            return x, right(x) + 0.01 * torch.randn(rows, 16)

        held_out = [make(2048)]
        torch.manual_seed(2 + seed)
        batches = [make(64) for _ in range(BEFORE + STEPS)]
    torch.manual_seed(0)
    return Teacher(sizes), batches, held_out


def digits(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    """A classifier of two layers."""
    _, train, held_out = images(seed)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10)
    )
    return WithLoss(net), train, held_out


class Bytes(torch.nn.Module):
    """The next byte of text, from the eight before it, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 16)
        self.up, self.head = torch.nn.Linear(128, 96), torch.nn.Linear(96, 256)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.gelu(self.up(self.embed(tokens).flatten(1)))), target)


def text(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    source = load(None, 64)
    parts = []
    of = ((source.train, BEFORE + STEPS, seed), (source.validation, 8, None))
    for data, count, own in of:
        drawn = Batches(data, 256, 8, count, own)
        parts.append([(x, y[:, -1].contiguous()) for x, y in drawn])
    return Bytes(), parts[0], parts[1]


def regression(seed: int) -> tuple[torch.nn.Module, list[Batch], list[Batch]]:
    """As teacher, of two layers."""
    return teacher(seed, (64, 128, 16))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": gpt, "vit": images, "mlp": teacher,
    "vit, images once": glyphs,  # added when the other one had learned its few images by heart
}  # fmt: skip
SMALL: dict[str, Callable[[], Any]] = {"text": text, "digits": digits, "regression": regression}


def report(what: str | None, names: Iterable[str], measure: Callable[[str], Any]) -> None:
    """The program of a study: measure(name) of each model, written to --out after each."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path)
    names = list(names)
    parser.add_argument("--models", nargs="+", default=names, choices=[*(MODELS | SMALL)])
    given = parser.parse_args()
    found: dict[str, Any] = {"models": {}, "environment": environment(quick=False)}
    for name in given.models:
        found["models"][name] = measure(name)
        if given.out:
            given.out.write_text(json.dumps(found))


class Task:
    """A model at the checkpoint, and its data."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """seed: of the order of the data."""
        torch.manual_seed(0)
        self.model, batches, self.held_out = (MODELS | SMALL)[name](seed)
        self.after = batches[BEFORE : BEFORE + STEPS]
        optimizer = self._optimizer(self.model)
        for batch in batches[:BEFORE]:
            self._step(self.model, optimizer, batch)
        self.state = copy.deepcopy(optimizer.state_dict())
        self.optimizer = optimizer

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return mixprec.optim.AdamW(model.parameters(), lr=LR)

    def _step(self, model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def plan(self, budget: dict[str, float], formats: tuple[str, ...]) -> Any:
        return mixprec.plan(
            self.model, self.after[:8], budget=budget, formats=formats, optimizer=self.optimizer,
            steps=len(self.after),
        )  # fmt: skip

    def run(self, apply: Callable[[Any], object] | None, order: int = 0) -> float:
        """The validation loss after the steps, of the model after apply(model); None: in FP32.
        order: the seed of the order of the batches, 0: as they are, and of stochastic rounding."""
        model = copy.deepcopy(self.model)
        if apply is not None:
            apply(model)
        optimizer = self._optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self.state))
        torch.manual_seed(order)
        places = torch.randperm(len(self.after)) if order else torch.arange(len(self.after))
        for i in places.tolist():
            self._step(model, optimizer, self.after[i])
        with torch.no_grad():
            losses = [float(model(*batch)) for batch in self.held_out]
        return sum(losses) / len(losses)
