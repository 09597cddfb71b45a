"""linear and conv2d in autograd and torch.compile: what is saved and skipped, derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from cases import for_each, normal, observed, pairwise
from independent import assert_same_lists
from layer_cases import OPS, leaf, linear, saved_tensors

from mixprec import functional
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import sqnr

EVERY = pairwise(list(RECIPES), list(OPS))


# --- what is saved and what is skipped ------------------------------------------------------------


@for_each("recipe, kind", EVERY)
def test_gradients_that_nobody_needs_cost_nothing(recipe: str, kind: str) -> None:
    op, x_shape, w_shape = OPS[kind]
    parsed = Recipe.parse(recipe)
    fx, fw, fg = parsed.x.name, parsed.w.name, parsed.g.name
    for x_grad, w_grad, bias_grad in (
        (True, True, True),
        (True, False, False),  # frozen weight
        (False, True, True),  # first layer
        (False, False, True),  # only the bias is trained
    ):
        x = normal(x_shape, torch.float32).requires_grad_(x_grad)
        w = normal(w_shape, torch.float32, seed=1).requires_grad_(w_grad)
        bias = torch.zeros(8).requires_grad_(bias_grad)
        seen: list[tuple[str, str, str, str]] = []
        with observed(lambda *call, into=seen: into.append(call)):
            with saved_tensors() as saved:
                y = op(x, w, bias, recipe=recipe, name="block.0")
            assert seen == [("forward", "block.0", fx, fw)]
            y.backward(torch.ones_like(y))
        want = [("grad_input", "block.0", fg, fw)] if x_grad else []
        want += [("grad_weight", "block.0", fg, fx)] if w_grad else []
        assert seen[1:] == want
        assert [t.grad is not None for t in (x, w, bias)] == [x_grad, w_grad, bias_grad]
        if not parsed.is_block:  # test_product_recipes.py counts what those save
            low = [t for t in saved if t.dtype != torch.float32]
            assert sum(t.numel() for t in low) == w.numel() * x_grad + x.numel() * w_grad
            assert all(t.itemsize == parsed.x.bits // 8 for t in low)


def test_16_bits_save_the_tensors_themselves_which_may_not_be_written_to() -> None:
    for recipe in ("bf16", "fp16", "fp8"):
        dtype = torch.bfloat16 if recipe == "bf16" else torch.float16
        for written in range(2):
            x, w = leaf(normal((6, 16), dtype)), leaf(normal((8, 16), dtype))
            y = linear(x, w, recipe=recipe)
            with torch.no_grad():
                (x, w)[written].zero_()
            if recipe != "fp8":  # which saved its own bytes
                with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                    y.sum().backward()
            else:
                y.sum().backward()
                assert min(x.grad.norm(), w.grad.norm()) > 0


# --- together with the rest of torch --------------------------------------------------------------


def derivatives(op: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """First, second and third derivatives of a sum of op(x, weight, bias)."""
    y = op(*tensors).sin().sum()
    found: list[torch.Tensor] = []
    for order in range(3):
        grads = torch.autograd.grad(y, tensors, create_graph=order < 2)
        found += grads
        y = sum((grad / grad.detach().norm()).square().sum() for grad in grads)
    return found


@for_each("recipe, kind", EVERY)
def test_higher_derivatives(recipe: str, kind: str) -> None:
    op, x_shape, w_shape = OPS[kind]
    run = functools.partial(op, recipe=recipe)
    torchs = torch.nn.functional.linear if kind == "linear" else torch.nn.functional.conv2d
    shapes = (x_shape, w_shape, w_shape[:1])
    tensors = [leaf(normal(s, torch.float32, seed=i) / 2) for i, s in enumerate(shapes)]
    with functional.twice_differentiable():
        got = derivatives(run, tensors)
    once = torch.autograd.grad(run(*tensors).sin().sum(), tensors)
    assert all(map(torch.equal, got[:3], once))
    least = {4: 3, 8: 10, 16: 35}[Recipe.parse(recipe).x.bits]
    for ours, exact in zip(got, derivatives(torchs, tensors), strict=True):
        assert sqnr(exact, ours) > least - 10 * (exact.numel() <= 8)  # of so few one may be off
    with pytest.raises(RuntimeError, match=r"create_graph=True: .*twice_differentiable\(\)"):
        torch.autograd.grad(run(*tensors).sum(), tensors[0], create_graph=True)


@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("recipe, kind", EVERY)
def test_autocast_outside_does_not_change_the_arithmetic(
    recipe: str, kind: str, dtype: torch.dtype
) -> None:
    op, x_shape, w_shape = OPS[kind]
    x, w = leaf(normal(x_shape, torch.float32)), leaf(normal(w_shape, torch.float32, seed=1))
    plain = op(x, w, recipe=recipe)
    want = torch.autograd.grad(plain.sum(), (x, w))
    for backward_too in (False, True):
        with torch.autocast("cpu", dtype):
            y = op(x, w, recipe=recipe)
        with torch.autocast("cpu", dtype, enabled=backward_too):
            got = torch.autograd.grad(y.sum(), (x, w))
        assert_same_lists([y, *got], [plain, *want])
