"""The addition before a norm, in the pass of the norm: ResidualSequential, MLP and mlp."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import HIDDEN, ROWS, WIDTH, feed_forward, gradients
from torch import nn

import mixprec
from mixprec import functional
from mixprec.nn import MLP, GatedMLP, ResidualSequential
from mixprec.ops.norm_quantize import norm_quantize_op
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr


class Branches(nn.Module):
    """Two branches of a block; `adds`: the second one adds what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = True
        self.first = ResidualSequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.second = ResidualSequential(*feed_forward())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, x = self.first(x)
        y, x = self.second(x, residual=y) if self.adds else self.second(x + y)
        return x + y


def pair(recipe: Any, fuse: bool = True) -> tuple[Branches, Branches, torch.Tensor]:
    """Two of the same weights, the second of which adds by itself."""
    torch.manual_seed(0)
    model = mixprec.convert(Branches(), recipe, fuse=fuse)
    other = copy.deepcopy(model)
    other.adds = False
    return model, other, torch.randn(2, ROWS, WIDTH)


def seeded(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # of recipes that round at random
    return gradients(model, x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_the_addition(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = pair(recipe)
    for _ in range(2):  # with delayed scales, with the first ones and with the next
        got, expected = seeded(model, x), seeded(other, x)
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == []
    low, added = x.bfloat16(), []

    def spy(x: torch.Tensor, residual: torch.Tensor | None, *args: Any) -> Any:
        added.append(residual is not None)
        return norm_quantize_op(x, residual, *args)

    monkeypatch.setattr("mixprec.functional._fused.norm_quantize_op", spy)
    got, expected = seeded(model, low), seeded(other, low)
    assert added == [False, True, False, False]
    assert torch.equal(got["y"], expected["y"])
    # Of the sum the gradient is rounded once, and not twice.
    assert sqnr(expected["x"].double(), got["x"]) > (30 if RECIPES[recipe].g.bits > 4 else 10)


@pytest.mark.parametrize("fuse", [True, False])
def test_what_is_not_finite_or_not_alike(fuse: bool) -> None:
    model, other, x = pair("bf16", fuse)
    assert torch.equal(model(x), other(x))
    y = torch.randn(2, ROWS, WIDTH)
    y[0, 3, 7], y[1, 5, 0], x[1, 5, 0] = math.nan, math.inf, -math.inf
    same = partial(torch.testing.assert_close, rtol=0.0, atol=0.0, equal_nan=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same(model.second(x.to(dtype), y.to(dtype)), model.second(x.to(dtype) + y.to(dtype)))
    same(model.second(x, y[0]), model.second(x + y[0]))  # torch broadcasts and promotes
    same(model.second(x, y.bfloat16()), model.second(x + y.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        same(model(x), other(x))
    model.second[0] = nn.Identity()  # another module in the place of the norm
    same(model.second(x, y), model.second(x + y))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "mxfp8"])
def test_compiled_as_eager(recipe: str) -> None:
    model, _, x = pair(recipe)
    twin = copy.deepcopy(model)
    twin.compile(backend="aot_eager", fullgraph=True)
    mine, expected = gradients(twin, x), gradients(model, x)
    assert [key for key in expected if not torch.equal(mine[key], expected[key])] == []


@pytest.mark.parametrize("norm", ["rms", None])
def test_modules_and_functions_add(norm: str | None) -> None:
    x, residual = torch.randn(2, 5, WIDTH).bfloat16(), torch.randn(2, 5, WIDTH).bfloat16()
    for kind in (MLP, GatedMLP):
        model = kind(WIDTH, HIDDEN, norm=norm)
        y, total = model(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, model(total))
    up, down = torch.randn(HIDDEN, WIDTH), torch.randn(WIDTH, HIDDEN)
    if norm is None:
        with pytest.raises(ValueError, match=r"^mlp: residual must be None without norm$"):
            functional.mlp(x, up, down, residual=residual)
    else:
        y, total = functional.mlp(x, up, down, norm=norm, residual=residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, functional.mlp(total, up, down, norm=norm))
