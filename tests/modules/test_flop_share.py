"""stats.flop_share: the share of a model's FLOPs that its recipes compute."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mixprec
from mixprec.diagnostics.stats import flop_share


def test_linear_layers(backend: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)), torch.ones(8, 64)
    assert flop_share(model, x) == 0
    mixprec.convert(model, "fp8", overrides={"2": None})
    assert flop_share(model, x) == pytest.approx(2 / 3)
    mixprec.convert(model, "fp8")
    assert flop_share(model, {"input": x}) == 1
    assert flop_share(model[0], x) == 1
    assert math.isnan(flop_share(nn.GELU(), x))


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_convolutions(recipe: str) -> None:
    """By their FLOPs, not their weights: the first one sees four times the pixels."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(16, 16, 3,
                          padding=1), nn.Conv2d(16, 144, 1))  # fmt: skip
    mixprec.convert(model, recipe, overrides={"0": None})
    x = torch.ones(1, 16, 8, 8)
    assert flop_share(model, x) == pytest.approx(2 / 6)
    with mixprec.autocast(enabled=False):
        assert flop_share(model, x) == 0


def test_attention_multiplies_its_heads_as_torch_does() -> None:
    layer, x = mixprec.convert(nn.MultiheadAttention(64, 4), "fp8"), torch.ones(32, 2, 64)
    projections, heads = 4 * 2 * 64 * 64 * 64, 2 * 2 * 2 * 32 * 32 * 64
    got = flop_share(layer, (x, x, x))  # with weights: torch does not count its fused CPU kernel
    assert got == pytest.approx(projections / (projections + heads))
