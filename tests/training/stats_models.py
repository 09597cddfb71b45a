"""Models, steps and rows for the tests of mixprec.stats."""

from __future__ import annotations

import math
from typing import Any

import torch
from independent import BY_DTYPE, cast, decode_table
from torch import nn

import mixprec
from mixprec.stats import Monitor

Row = dict[str, Any]


def of(monitor: Monitor, layer: str, tensor: str, sample: int = -1) -> Row:
    rows = monitor.records[sample]["tensors"]
    (found,) = (row for row in rows if (row["layer"], row["tensor"]) == (layer, tensor))
    return found


def one_linear(recipe: str = "fp8", bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return mixprec.convert(nn.Sequential(nn.Linear(16, 24, bias=bias)), recipe)


def one_step(model: nn.Module, x: torch.Tensor, g: torch.Tensor | None = None) -> torch.Tensor:
    y = model(x)
    y.backward(torch.ones_like(y) if g is None else g)
    return y


def measured(
    model: nn.Module, *xs: torch.Tensor, g: torch.Tensor | None = None, **options: Any
) -> Monitor:
    """A step of each x, all of them sampled."""
    with Monitor(model, every=1, **options) as monitor:
        for x in xs:
            one_step(model, x, g)
            monitor.step()
    return monitor


def by_hand(t: torch.Tensor, fmt: mixprec.Format) -> torch.Tensor:
    """t cast to FP8 with a power of two as its scale, and back; FP64."""
    spec, scale = BY_DTYPE[fmt.dtype], 2.0 ** math.floor(math.log2(fmt.max / t.abs().max().item()))
    return torch.from_numpy(decode_table(spec)[cast(t, scale, spec)]) / scale


class Net(nn.Module):
    """Reuses a layer, has a frozen one, one in place after it, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.twice = nn.Linear(16, 16)
        self.relu = nn.ReLU(inplace=True)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        x = self.relu(self.twice(x))
        return self.tied(self.twice(input=x))
