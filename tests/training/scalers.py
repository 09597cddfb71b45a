"""Optimizers of torch and of ours for tests of scalers, and one step with given gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW

Optimizer = torch.optim.Optimizer
INF, NAN = math.inf, math.nan
Make = Callable[[Any], torch.optim.Optimizer]
torch_sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
torch_plain = partial(torch.optim.AdamW, lr=0.05, foreach=False)
torch_foreach = partial(torch.optim.Adam, lr=0.05, foreach=True)
torch_fused = partial(torch.optim.AdamW, lr=0.05, fused=True)
our_sgd = partial(SGD, lr=0.05, momentum=0.9)
our_adamw = partial(AdamW, lr=0.05)
our_adam = partial(Adam, lr=0.05)
our_clipping_adamw = partial(AdamW, lr=0.1, max_grad_norm=1.0)
TORCHS: tuple[Make, ...] = (torch_sgd, torch_plain, torch_foreach, torch_fused)
OURS: tuple[Make, ...] = (our_sgd, our_adamw, our_adam)


def with_optimizers(*makes: Any) -> pytest.MarkDecorator:
    ids = ["-".join([m.func.__module__, m.func.__name__, *m.keywords]) for m in makes]
    return pytest.mark.parametrize("make", makes, ids=ids)


every_optimizer = with_optimizers(*TORCHS, *OURS)
every_way = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_"])


def param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def filled(shape: tuple[int, ...], *values: float, dtype: torch.dtype = torch.float32) -> Any:
    """Ones, but for the first elements."""
    grad = torch.ones(shape, dtype=dtype)
    grad.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
    return grad


def step(scaler: GradScaler, optimizer: Optimizer, explicit: bool = False) -> None:
    scaler.scale(torch.zeros(()))
    if explicit:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GradScaler.unscale_: unscaled gradients are rounded")
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def iterate(
    scaler: GradScaler, optimizer: Optimizer, *values: float, explicit: bool = False
) -> None:
    """One iteration in which the param's gradient starts with `values`, the rest ones."""
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = filled(tuple(p.shape), *values, dtype=p.dtype)
    step(scaler, optimizer, explicit)
