"""Several gradients in one call, as torch's own layers take them: autograd.grad with
is_grads_batched and autograd.functional.jacobian with vectorize."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import attention, grouped_linear, linear_cross_entropy, rotary


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 48)).transpose(-2, -3).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2))


def fused(*parts: nn.Module) -> Callable[[str], nn.Module]:
    return lambda recipe: mixprec.convert(nn.Sequential(*parts), recipe, fuse=True)


CLIPPED = dataclasses.replace(mixprec.Recipe.parse("fp16"), clip_activations=True)
LAYERS: dict[str, tuple[Callable[[str], Any], tuple[int, ...]]] = {
    "linear": (lambda r: mixprec.convert(nn.Linear(32, 16), r), (3, 32)),
    "norm": (fused(nn.LayerNorm(32), nn.Linear(32, 32)), (3, 32)),
    "mlp": (fused(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), (3, 32)),
    "attention": (lambda r: mixprec.convert(Attention(), r, fuse=True), (2, 4, 32)),
    "conv": (lambda r: mixprec.convert(nn.Conv2d(4, 8, 3), r), (2, 4, 5, 5)),
    "conv 1": (lambda r: mixprec.convert(nn.Conv2d(4, 8, 1), r), (2, 4, 3, 3)),
    "transposed": (lambda r: mixprec.convert(nn.ConvTranspose1d(4, 8, 3), r), (2, 4, 5)),
    "experts": (lambda r: Experts(r), (6, 32)),
    "loss": (lambda r: mixprec.nn.LinearCrossEntropy(32, 10, reduction="none", recipe=r), (6, 32)),
    "checkpoint": (lambda r: Again(mixprec.convert(nn.Linear(32, 16), r)), (3, 32)),
    "clipped": (lambda _: mixprec.convert(nn.Linear(32, 16), CLIPPED), (3, 32)),
}


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Again(First):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Experts(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe, self.weight = recipe, nn.Parameter(torch.randn(2, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 6], dtype=torch.int32)
        return grouped_linear(x, self.weight, ends, recipe=self.recipe)


@for_each("recipe", ["bf16", "fp8", "fp8-rowwise", "fp8-block"])
@for_each("name", LAYERS)
def test_batched_gradients_are_those_of_one_call_each(name: str, recipe: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x = make(recipe), torch.randn(shape, requires_grad=True)
    args = (torch.arange(6),) if name == "loss" else ()
    inputs = [x, *model.parameters()]
    y = model(x, *args)
    grads = torch.randn(3, *y.shape)
    want = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in grads]
    got = torch.autograd.grad(model(x, *args), inputs, grads, is_grads_batched=True)
    for batch, parts in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(batch, torch.stack(parts))


def test_functions() -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    angles = torch.rand(3, 4)
    for run in (
        lambda: attention(q, q.detach(), q, causal=True),
        lambda: rotary(q, angles.cos(), angles.sin()),
        lambda: linear_cross_entropy(q[0, 0], torch.ones(5, 8), torch.arange(3)),
    ):
        y = run()
        grads = torch.randn(3, *y.shape)
        (got,) = torch.autograd.grad(run(), q, grads, is_grads_batched=True)
        want = [torch.autograd.grad(y, q, g, retain_graph=True)[0] for g in grads]
        assert torch.equal(got, torch.stack(want))


def test_hessian() -> None:
    torch.manual_seed(0)
    layer, x = mixprec.nn.Linear(8, 4, recipe="bf16"), torch.randn(2, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with mixprec.functional.twice_differentiable():
            return layer(x).square().sum()

    hessian = torch.autograd.functional.hessian
    with mixprec.functional.twice_differentiable():
        assert torch.equal(hessian(loss, x, vectorize=True), hessian(loss, x))


def test_state_is_refused() -> None:
    layer, x = mixprec.nn.Linear(8, 4, recipe="fp8-delayed"), torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="keep state"):
        torch.autograd.grad(layer(x), x, torch.ones(3, 2, 4), is_grads_batched=True)


def test_nothing_of_a_node_is_shadowed() -> None:
    """`ctx` is a node of torch's graph, whose name and edges others read."""
    own = set(dir(torch.autograd.function.BackwardCFunction)) - {"saved_tensors"}  # of a stand-in
    for path in (Path(mixprec.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_node = isinstance(node.value, ast.Name) and node.value.id == "ctx"
                assert not (is_node and node.attr in own), f"{path}:{node.lineno}: {node.attr}"
