"""grouped_linear: the bits of a loop of linear over the experts, without a host sync."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from cases import for_each, name, observed
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mixprec
from mixprec.functional import _grouped_linear, grouped_linear
from mixprec.functional._products import Product
from mixprec.functional._transforms import _Context
from mixprec.ops._dispatch.op import OPS
from mixprec.recipes import RECIPES, Recipe

NAMED = [r for r in RECIPES.values() if not r.is_delayed and not r.backward]
MIXED = [
    Recipe(
        f"{x}-{w}-{g}", "e4m3", "e4m3", "e5m2", x_granularity=x, w_granularity=w, g_granularity=g,
        power_of_two_scale=False,
    )
    for x, w, g in itertools.product(
        ("tensor", "row", "block1x128"), ("tensor", "row", "block1x128", "block128x128"),
        ("tensor", "row", "block1x128"),
    )
]  # fmt: skip
# The ends of the groups, and S: empty ones, one for all, rows beyond the last, no rows, one expert.
GROUPS = (([90, 90, 230], 300), ([0, 40, 40], 40), ([0, 0], 0), ([7], 9), ([2, 3, 4, 4, 8], 8))
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def arguments(turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, with rows of different magnitudes, weight and offs."""
    (ends, s), dtype = GROUPS[turn % len(GROUPS)], WIDE[turn % 3]
    k, n = ((144, 130), (33, 256), (20, 7))[turn // 2 % 3]
    weight = torch.randn(len(ends), n, k) * torch.rand(len(ends), 1, 1) * 4
    x = torch.randn(s, k) * torch.rand(s, 1) * 10
    return x.to(dtype), weight.to(dtype), torch.tensor(ends, dtype=torch.int32)


def passes(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, main: bool = False, **options: Any
) -> list[torch.Tensor]:
    """y and the gradients of x and weight."""
    x, weight = x.clone().requires_grad_(), nn.Parameter(weight.clone())
    if main:
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    y = grouped_linear(x, weight, offs, **options)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    assert (weight.grad is None) is main
    of_weight = weight.main_grad if main else weight.grad
    assert x.grad is not None
    return [y.detach(), x.grad, of_weight]  # type: ignore[list-item]


def loop(patch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[torch.Tensor]:
    with patch.context() as only:
        only.setattr(_grouped_linear, "in_one_call", lambda recipe: False)
        return passes(*args, **options)


@pytest.mark.parametrize("recipe", [*NAMED, *MIXED], ids=name)
def test_the_same_bits_as_a_loop(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """Each group and each weight has scales of its own. (Random bits are others.)"""
    if recipe.stochastic_rounding:
        recipe = dataclasses.replace(recipe, stochastic_rounding=())
    first = MIXED.index(recipe) if recipe in MIXED else 0
    for turn in range(first, first + (2 if recipe in MIXED else len(GROUPS))):
        args = arguments(turn)
        for main in (False, True):
            got = passes(*args, main, recipe=recipe)
            want = loop(monkeypatch, *args, main, recipe=recipe)
            assert all(map(torch.equal, got, want)), (turn, main)
            assert not got[0][args[2][-1] :].any()
            assert not got[1][args[2][-1] :].any()


ONE_CALL = ("bf16", "fp16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4")


def test_which_recipes_are_one_call() -> None:
    """The others multiply group by group."""
    x, weight, offs = arguments(0)
    for recipe in NAMED:
        calls: list[str] = []
        with observed(lambda kind, *_, into=calls: into.append(kind)):
            passes(x, weight, offs, recipe=recipe)
        each = 1 if recipe.name in ONE_CALL else 3
        assert calls == ["forward"] * each + ["grad_input", "grad_weight"] * each, recipe


def test_delayed_scaling_has_one_scale_and_does_not_see_rows_beyond_the_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mixprec.functional.operands import Delayed

    x, weight, offs = arguments(0)
    x[offs[-1] :] = torch.nan

    def state() -> Delayed:
        return Delayed(torch.tensor([8.0, 64.0]), torch.zeros(()), torch.zeros(()))

    mine, theirs = state(), state()
    got = passes(x, weight, offs, recipe="fp8-delayed", delayed=mine)
    want = loop(monkeypatch, x, weight, offs, recipe="fp8-delayed", delayed=theirs)
    assert all(map(torch.equal, (*got, *mine), (*want, *theirs)))
    assert mine.amax == x[: offs[-1]].abs().max()


@pytest.mark.parametrize("recipe", ONE_CALL)
def test_nothing_is_read_on_the_host(recipe: str) -> None:
    """Both passes on a fake GPU, where a value that is read is an error."""
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        x = torch.empty(64, 256, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(4, 128, 256, dtype=torch.bfloat16, device="cuda")
        offs = torch.empty(4, dtype=torch.int32, device="cuda")
        assert grouped_linear(x, weight, offs, recipe=recipe).shape == (64, 128)
        for main_grad in (None, torch.empty(weight.shape, device="cuda")):
            ctx: Any = _Context((True, True))
            y = _grouped_linear._GroupedLinear.forward(
                ctx, x, weight, offs, Product(main_grad), RECIPES[recipe], torch.bfloat16, True
            )
            of_x, of_weight, *_ = _grouped_linear._GroupedLinear.backward(ctx, torch.empty_like(y))
            assert (of_x.shape, of_x.device.type) == (x.shape, "cuda")
            assert of_weight is None if main_grad is not None else of_weight.shape == weight.shape


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_compiled_checkpointed_and_transformed(recipe: str) -> None:
    """The same bits; with other ends no new compilation. A checkpoint may keep results of ops."""
    ops = [getattr(torch.ops.mixprec, name).default for name in OPS]
    keep = functools.partial(create_selective_checkpoint_contexts, ops)

    def run(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, weight, offs, recipe=recipe)

    x, weight, offs = (t.requires_grad_(t.is_floating_point()) for t in arguments(0))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for ends in (offs, torch.tensor([0, 10, 299], dtype=torch.int32)):
        want = torch.autograd.grad(run(x, weight, ends).square().sum(), (x, weight))
        with torch._dynamo.config.patch(error_on_recompile=ends is not offs):
            y = compiled(x, weight, ends)
        again = checkpoint(run, x, weight, ends, use_reentrant=False)
        kept = checkpoint(run, x, weight, ends, use_reentrant=False, context_fn=keep)
        for other in (y, again, kept):
            got = torch.autograd.grad(other.square().sum(), (x, weight))
            assert all(map(torch.equal, got, want))
    transformed = torch.func.grad(lambda x: run(x, weight.detach(), ends).square().sum())
    assert torch.equal(transformed(x.detach()), want[0])


def test_a_write_to_offs_in_compiled_code_comes_after_the_layer() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        y = grouped_linear(x, weight, offs, recipe="fp8")
        offs.add_(1)
        return y

    x, weight, offs = (t.requires_grad_(t.is_floating_point()) for t in arguments(0))
    want = torch.autograd.grad(grouped_linear(x, weight, offs, recipe="fp8").sum(), (x, weight))
    y = torch.compile(run, backend="aot_eager", fullgraph=True)(x, weight, offs.clone())
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), want))


def test_second_derivatives_are_refused_or_those_of_the_loop() -> None:
    x, weight, offs = (t.requires_grad_(t.is_floating_point()) for t in arguments(0))
    y = grouped_linear(x, weight, offs, recipe="bf16")
    with pytest.raises(RuntimeError, match="twice_differentiable"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with mixprec.functional.twice_differentiable():
        y = grouped_linear(x, weight, offs, recipe="bf16")
        (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        of_x.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.any()


@pytest.mark.filterwarnings("error")
@for_each("recipe", ["bf16", "fp8", "fp8-block", "nvfp4"])
def test_strided_offs_inside_of_autocast(recipe: str) -> None:
    x, weight = torch.randn(6, 32).half().requires_grad_(), torch.randn(2, 16, 32)
    offs = torch.tensor([0, 2, 0, 6], dtype=torch.int32)[1::2]
    results = []
    for ends, autocast in ((offs, True), (offs.clone(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = grouped_linear(x, weight, ends, recipe=recipe)
        results.append((y, *torch.autograd.grad(y.float().sum(), x)))
    assert all(map(torch.equal, *results))


X, WEIGHT, OFFS = torch.ones(8, 6), torch.ones(2, 5, 6), torch.tensor([3, 8], dtype=torch.int32)


@for_each(
    "changes, message",
    [
        ({"x": X.double()}, "x must have dtype"),
        ({"x": X[0]}, r"x must be \[S, K\] with K = 6"),
        ({"x": X[:, :5]}, r"x must be \[S, K\] with K = 6"),
        ({"weight": WEIGHT[0]}, r"weight must be \[E, N, K\]"),
        ({"offs": OFFS.long()}, "offs must have dtype int32"),
        ({"offs": OFFS[:1]}, r"offs must have shape \[E\]"),
        ({"offs": OFFS.flip(0)}, "offs must be the ends of the groups"),
        ({"offs": OFFS + 1}, "offs must be the ends of the groups"),
        ({"out_dtype": torch.int8}, "out_dtype must be"),
        ({"recipe": "fp8-delayed"}, "recipe fp8-delayed has delayed scaling"),
    ],
)
def test_invalid_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^grouped_linear: {message}"):
        grouped_linear(**{"x": X, "weight": WEIGHT, "offs": OFFS, **changes})
