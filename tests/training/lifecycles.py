"""Random lives of 16-bit parameters, beside the same life of FP32 ones."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mixprec
from mixprec.optim import SGD, Adam, AdamW, AveragedModel, Masters, fp32_state_dict

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(AdamW, lr=1e-4, eps=1e-3),
    "Adam": partial(Adam, lr=1e-4, eps=1e-3),
    "SGD": partial(SGD, lr=1e-3),
    "momentum": partial(SGD, lr=1e-3, momentum=0.5),
    "NAdam": partial(Masters, torch.optim.NAdam, lr=1e-4, eps=1e-3),
}
FORMS: list[dict[str, Any]] = [{}, {"master_weights": "remainder16"}]


def module(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return model


class Life:
    """A model in `dtype` whose FP32 values are to be those of an FP32 twin."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice, self.folder = random.Random(seed), folder
        self.dtype = self.dice.choice([torch.bfloat16, torch.float16])
        self.log: list[str] = []
        self.wide = module(seed)
        self.low = self.cast(copy.deepcopy(self.wide))
        self.averages = [AveragedModel(m, avg_fn=_average) for m in (self.low, self.wide)]
        self.new_optimizer()

    def cast(self, model: nn.Module) -> nn.Module:
        return mixprec.cast_parameters(model, self.dtype)

    def fresh(self) -> nn.Module:
        """A model with other values and what is frozen here frozen."""
        model = self.cast(module(self.dice.randrange(99)))
        for p, q in zip(model.parameters(), self.wide.parameters(), strict=True):
            p.requires_grad_(q.requires_grad)
        return model

    # What may happen. The name of each is in the log.

    def train(self) -> None:
        for _ in range(self.dice.randint(1, 3)):
            generator = torch.Generator().manual_seed(self.dice.randrange(10**6))
            for p, q in zip(self.low.parameters(), self.wide.parameters(), strict=True):
                if q.requires_grad:
                    q.grad = torch.randn(q.shape, generator=generator).to(self.dtype).float()
                    p.grad = q.grad.to(p.dtype)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def new_optimizer(self) -> None:
        name, self.form = self.dice.choice([*KINDS]), self.dice.choice(FORMS)
        self.kind = KINDS[name]
        if name == "NAdam":
            self.form = {}
        self.optimizers = self.make()

    def make(self) -> list[torch.optim.Optimizer]:
        return [self.kind(self.low.parameters(), **self.form), self.kind(self.wide.parameters())]

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def freeze_or_not(self) -> None:
        i, trained = self.dice.choice([0, 2]), self.dice.random() < 0.5
        for model in (self.low, self.wide):
            model[i].requires_grad_(trained)

    def copy_both(self) -> None:
        order = self.dice.random() < 0.5
        self.low, self.optimizers[0] = (
            copy.deepcopy((self.low, self.optimizers[0]))
            if order
            else reversed(copy.deepcopy((self.optimizers[0], self.low)))
        )

    def copy_model(self) -> None:
        self.low = copy.deepcopy(self.low)
        self.optimizers = self.make()

    def pickle_both(self) -> None:
        file = io.BytesIO()
        torch.save((self.low, self.optimizers[0]), file)
        file.seek(0)
        self.low, self.optimizers[0] = torch.load(file, weights_only=False)

    def checkpoint(self) -> None:
        path = self.folder / "life.pt"
        mixprec.save_checkpoint(path, model=self.low, optimizer=self.optimizers[0], rng=False)
        model = self.fresh()
        optimizer = self.kind(model.parameters(), **self.form)
        mixprec.load_checkpoint(path, model=model, optimizer=optimizer, rng=False)
        self.low, self.optimizers[0] = model, optimizer

    def checkpoint_of_the_model(self) -> None:
        path = self.folder / "life.pt"
        mixprec.save_checkpoint(path, model=self.low, rng=False)
        model = self.fresh()
        made_before = self.dice.random() < 0.5
        optimizer = self.kind(model.parameters(), **self.form) if made_before else None
        mixprec.load_checkpoint(path, model=model, rng=False)
        self.low = model
        self.optimizers = self.make()
        self.optimizers[0] = optimizer or self.optimizers[0]

    def checkpoint_of_fp32(self) -> None:
        path = self.folder / "life.pt"
        mixprec.save_checkpoint(path, model=self.wide, optimizer=self.optimizers[1], rng=False)
        model = self.fresh()
        optimizer = self.kind(model.parameters(), **self.form)
        options: dict[str, Any] = {"rng": False, "convert_dtype": True}
        mixprec.load_checkpoint(path, model=model, optimizer=optimizer, **options)
        self.low, self.optimizers[0] = model, optimizer

    def fp32_values(self) -> None:
        model, state = self.fresh(), fp32_state_dict(self.low)
        if self.dice.random() < 0.5:
            self.low = model
            self.optimizers = self.make()
            model.load_state_dict(state)
        else:
            model.load_state_dict(state)
            self.low = model
            self.optimizers = self.make()

    def state_of_fp32(self) -> None:
        self.optimizers[0].load_state_dict(self.optimizers[1].state_dict())

    def own_state(self) -> None:
        for part in self.dice.sample([self.low, self.optimizers[0]], 2):
            part.load_state_dict(copy.deepcopy(part.state_dict()))

    def to_fp32_and_back(self) -> None:
        if self.dice.random() < 0.5:
            self.low.float()
        if self.dice.random() < 0.5:
            mixprec.cast_parameters(self.low, torch.float32)
        if self.dice.random() < 0.5:
            self.train()
        self.cast(self.low)

    def other_dtype(self) -> None:
        self.dtype = torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16
        self.cast(self.low)

    def evaluate_other_weights(self) -> None:
        if all(p.requires_grad for p in self.low.parameters()):
            own, other = copy.deepcopy(self.low.state_dict()), self.averages[0].module.state_dict()
            self.low.load_state_dict(
                other if self.dice.random() < 0.5 else self.cast(module(3)).state_dict()
            )
            self.low.load_state_dict(own)

    def average(self) -> None:
        for average, model in zip(self.averages, (self.low, self.wide), strict=True):
            average.update_parameters(model)

    def copy_average(self) -> None:
        self.averages[0] = copy.deepcopy(self.averages[0])

    def edit_groups(self) -> None:
        """A param goes and comes back."""
        for optimizer, model in zip(self.optimizers, (self.low, self.wide), strict=True):
            group = optimizer.param_groups[0]["params"]
            p = next(model.parameters())
            group[:] = [q for q in group if q is not p]
        self.train_without_the_first()
        for optimizer, model in zip(self.optimizers, (self.low, self.wide), strict=True):
            optimizer.param_groups[0]["params"].insert(0, next(model.parameters()))
        if self.dice.random() < 0.5:
            self.new_optimizer()

    def train_without_the_first(self) -> None:
        self.train()
        for model in (self.low, self.wide):
            next(model.parameters()).grad = None

    def convert(self) -> None:
        recipe = self.dice.choice(["fp8", "bf16", None])
        if recipe is None:
            mixprec.unconvert(self.low)
        else:
            mixprec.convert(self.low, recipe)

    ACTIONS = (
        *("train", "new_optimizer", "clear", "freeze_or_not", "copy_both", "copy_model"),
        *("pickle_both", "checkpoint", "checkpoint_of_the_model", "checkpoint_of_fp32"),
        *("fp32_values", "state_of_fp32", "own_state", "to_fp32_and_back", "other_dtype"),
        *("evaluate_other_weights", "average", "copy_average", "edit_groups", "convert"),
    )

    def live(self, length: int = 12) -> None:
        self.train()
        for _ in range(length):
            action = self.dice.choice([*self.ACTIONS, "train", "train"])
            self.log.append(f"{action} {self.dtype} {self.form}")
            getattr(self, action)()
        self.train()
        self.check()

    def check(self) -> None:
        """FP32 values of both, to what different roundings of FP32 steps and remainders leave."""
        pairs = [(fp32_state_dict(self.low), self.wide.state_dict())]
        pairs.append(tuple(average.module.state_dict() for average in self.averages))  # type: ignore[arg-type]
        for low, wide in pairs:
            for name, want in wide.items():
                off = (low[name].float() - want).abs().max().item()
                assert off < 1e-5, f"{name} is off by {off}:\n" + "\n".join(self.log)
        for p, (name, value) in zip(
            self.low.parameters(), fp32_state_dict(self.low).items(), strict=True
        ):
            assert torch.equal(p, value.to(p.dtype)), name


def _average(old: torch.Tensor, new: torch.Tensor, count: Any) -> torch.Tensor:
    return old.lerp(new.to(old.dtype), 0.1)
