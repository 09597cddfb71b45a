"""torch.compile of the blocks of a converted model: `for block in model.blocks: block.compile()`.

Inductor compiles what lies between our ops. In a fused block that is casts and additions, each of
which rounds once: all bits are those of the eager model, but for the gradients of biases, FP32 sums
over rows that it adds in another order. Norms and GELU of blocks that are not fused are its own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import normal
from test_fp8_inductor import no_compiler
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

import mixprec
from mixprec.functional import rotary
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import sqnr

WIDTH, HEADS, T, BLOCKS = 32, 2, 20, 3
QUICK = ("bf16", "fp8-delayed")


@pytest.fixture(autouse=True)
def inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    if reason := no_compiler():
        pytest.skip(reason)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        hidden = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU("tanh"), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *hidden)
        self.register_buffer("angle", torch.outer(torch.arange(T), 0.1 ** torch.arange(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2))
        q, k = (rotary(y, self.angle.cos(), self.angle.sin()) for y in (q, k))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def model_of(recipe: Recipe, fuse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return mixprec.convert(nn.Sequential(*(Block() for _ in range(BLOCKS))), recipe, fuse=fuse)


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    """The output and the gradients of two micro-batches, and what the layers keep."""
    x = normal((2, T, WIDTH), torch.float32, seed=1).requires_grad_()
    for seed in (2, 3):
        y = model(x)
        y.backward(normal(y.shape, torch.float32, seed))
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads, **dict(model.named_buffers())}


def eager_and_compiled(recipe: Recipe, fuse: bool) -> list[dict[str, torch.Tensor]]:
    model = model_of(recipe, fuse)
    eager = copy.deepcopy(model)
    for block in model:
        block.compile(fullgraph=True)
    counters.clear()
    both = [results(each) for each in (eager, model)]
    assert counters["stats"]["unique_graphs"] == 1, "blocks share what is compiled"
    assert not counters["recompile_limit"]
    return both


def nearest(name: str) -> Recipe:
    """Without stochastic rounding, for which Inductor draws other numbers."""
    return replace(Recipe.parse(name), stochastic_rounding=())


def _some(quick: Any) -> list[Any]:
    names = [name for name in RECIPES if not nearest(name).is_random]  # nor its `products`
    return [pytest.param(r, marks=() if r in quick else pytest.mark.slow) for r in names]


@pytest.mark.parametrize("name", _some(QUICK))
def test_fused_blocks_have_the_bits_of_the_eager_model(name: str) -> None:
    eager, compiled = eager_and_compiled(nearest(name), fuse=True)
    assert len(eager) >= 2 + 10 * BLOCKS
    for kind, a in eager.items():
        # FP32 scales of rows times a sum, which is added to the gradient so far: one rounding less.
        summed = kind.endswith("bias") or (name == "nvfp4-rowwise" and kind.endswith("weight"))
        same = torch.equal(a, compiled[kind])
        assert same or (summed and float(sqnr(a, compiled[kind])) > 120), kind


@pytest.mark.parametrize("name", _some(()))
def test_blocks_that_are_not_fused_are_as_close_as_rounding_makes_them(name: str) -> None:
    """An FP32 number that is off by one rounding may be cast to another 16-bit or 8-bit one: a few
    elements are off by a step of their format, and all together by less than 1 %."""
    eager, compiled = eager_and_compiled(nearest(name), fuse=False)
    for kind, a in eager.items():
        assert torch.equal(a, compiled[kind]) or float(sqnr(a, compiled[kind])) > 40, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.stochastic_rounding])
def test_stochastic_rounding_is_as_far_from_fp32_as_in_eager_mode(name: str) -> None:
    recipe = Recipe.parse(name)
    eager, compiled = eager_and_compiled(recipe, fuse=True)
    with mixprec.autocast(enabled=False):
        wanted = results(model_of(recipe, fuse=True))
    for kind, exact in wanted.items():
        if "angle" not in kind:
            noise = (min(100.0, sqnr(exact, each[kind])) for each in (eager, compiled))
            assert abs(next(noise) - next(noise)) < 6, kind
