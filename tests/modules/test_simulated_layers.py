"""Layers inside mixprec.simulate: the three GEMMs of every recipe, threads, compiled code."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from cases import for_each, normal
from models import Model

import mixprec
from mixprec.functional import operands
from mixprec.recipes import RECIPES, Recipe

GEMM = torch.ops.mixprec.gemm_simulated
K, N, M = 320, 136, 160  # more than the 128 of which sums are promoted
FP8 = RECIPES["fp8"]
RECIPES_IN_USE = (
    *(recipe for recipe in RECIPES.values() if not recipe.is_block),
    replace(FP8, fast_accum=["forward", "grad_weight"]),
    replace(FP8, fast_accum=["grad_input"]),
)


def inside(arch: str | None) -> AbstractContextManager[None]:
    return nullcontext() if arch is None else mixprec.simulate(arch)


def layer_of(recipe: str | Recipe) -> torch.nn.Module:
    torch.manual_seed(0)
    return mixprec.convert(torch.nn.Sequential(torch.nn.Linear(K, N)), recipe)


def run(
    recipe: str | Recipe, forward: str | None, backward: str | None, main_grad: bool = False
) -> list[torch.Tensor]:
    """y, computed inside simulate(forward), and the gradients, inside simulate(backward)."""
    layer, x = layer_of(recipe), normal((M, K), torch.float32).requires_grad_()
    weight = layer[0].weight
    if main_grad:
        weight.main_grad = torch.zeros(N, K)
    with inside(forward):
        y = layer(x)
    with inside(backward):
        y.backward(normal((M, N), torch.float32, 1))
    return [y.detach(), x.grad, weight.main_grad if main_grad else weight.grad]


def by_hand(recipe: Recipe, arch: str, main_grad: bool) -> list[torch.Tensor]:
    layer = layer_of(recipe)[0]
    x, g = normal((M, K), torch.float32), normal((M, N), torch.float32, 1)
    values = {"x": x, "w": layer.weight.detach(), "g": g}
    x, w, g = (operands.cast(v, role, recipe, None, use_t=True) for role, v in values.items())

    def product(kind: str, a: operands.Matrix, b: operands.Matrix) -> torch.Tensor:
        bias = layer.bias.detach() if kind == "forward" else None
        fast = kind in recipe.fast_accum and not (main_grad and kind == "grad_weight")
        b_inv = None if b.scale_inv is None else b.scale_inv.t()
        return GEMM(a.data, b.data.t(), a.scale_inv, b_inv, bias, torch.float32, fast, arch)

    return [
        product("forward", x.matrix, w.matrix),
        product("grad_input", g.matrix, w.matrix_t),
        product("grad_weight", g.matrix_t, x.matrix_t),
    ]


@for_each("recipe", RECIPES_IN_USE)
def test_all_products_are_those_of_the_gpu(recipe: Recipe) -> None:
    """The backward pass keeps what the forward pass was in, wherever it is called."""
    plain = run(recipe, None, None)
    for arch, backward in (("hopper", None), ("ada", "hopper")):
        for main_grad in (False, True):
            got = run(recipe, arch, backward, main_grad)
            assert all(map(torch.equal, got, by_hand(recipe, arch, main_grad))), arch
        assert not any(map(torch.equal, got, plain))
    assert all(map(torch.equal, run(recipe, None, "hopper"), plain))


def test_block_formats_are_refused() -> None:
    for recipe in ("mxfp8", "nvfp4-1x16"):
        with pytest.raises(ValueError, match=r"^simulate: tensor cores apply the scales of bl"):
            run(recipe, "blackwell", None)


def test_second_derivatives() -> None:
    """The products of higher derivatives are simulated like the block they are computed in."""
    layer, x = layer_of("bf16"), normal((M, K), torch.float32).requires_grad_()
    seconds = []
    for arch in (None, "hopper"):
        with inside(arch), mixprec.functional.twice_differentiable():
            (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            seconds += torch.autograd.grad(g.square().sum(), x)
    assert not torch.equal(*seconds)
    assert torch.allclose(*seconds, rtol=0.05, atol=0.5)


def test_flops_are_counted() -> None:
    layer = layer_of("fp8")
    with mixprec.simulate("hopper"), torch.no_grad(), mixprec.audit(layer) as audit:
        layer(normal((M, K), torch.float32))
    assert [*audit.decided] == ["recipe fp8"]


def test_compare_as_a_gpu() -> None:
    def mean_square() -> torch.nn.Module:
        layer = torch.nn.Linear(1024, 16)
        return Model(lambda self, x: self.layer(x).float().square().mean(), layer=layer)

    short = replace(FP8, fast_accum=True)  # long sums lose the most
    batches = [normal((32, 1024), torch.float32, i).abs() for i in range(3)]
    arguments = mean_square, batches, ("fp32", short)
    plain, hopper = (mixprec.compare(*arguments, simulate=arch) for arch in (None, "hopper"))
    assert hopper.options["simulate"] == "hopper"
    assert "simulate" not in plain.options
    assert plain["fp32"].losses == hopper["fp32"].losses
    assert plain["fp8"].losses != hopper["fp8"].losses
    assert mixprec.compare(*arguments, simulate="H100").options == hopper.options
    with pytest.raises(ValueError, match=r"^simulate: the tensor cores of a100 have no .*e4m3"):
        mixprec.compare(*arguments, simulate="a100")
    with pytest.raises(ValueError, match=r"^simulate: arch must be one of"):
        mixprec.compare(*arguments, simulate="h300")
