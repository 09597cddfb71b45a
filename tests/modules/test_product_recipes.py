"""Recipes whose grad_input and grad_weight products have recipes of their own."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import for_each, nearest, normal, observed, pairwise
from independent import assert_same_bits, assert_same_lists
from layer_cases import BLOCK_MIXES, leaf, saved_tensors
from models import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import functional
from mixprec.functional import operands
from mixprec.ops._reference.block_formats import BLOCK, hadamard
from mixprec.ops.dequantize import dequantize_mx_op
from mixprec.recipes import GEMMS, RECIPES, Recipe
from mixprec.testing import sqnr

# Of the products forward, grad_input and grad_weight, rounded to nearest. Each recipe is at each
# place, and beside each other one.
NAMES = ("bf16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8")
MIXES = [
    (NAMES[i], NAMES[(i + step) % 5], NAMES[(i + 2 * step) % 5])
    for i in range(5)
    for step in range(1, 5)
]
OFFS = torch.tensor([20, 20, 48], dtype=torch.int32)
Grads = tuple[torch.Tensor, ...]


def joined(forward: str, grad_input: str, grad_weight: str) -> str:
    return f"{forward}+gi-{grad_input}+gw-{grad_weight}"


def linear(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight, recipe=recipe)


def pointwise(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    image = x.view(2, 6, 4, 160).permute(0, 3, 1, 2)
    return functional.conv2d(image, weight[:, :, None, None], recipe=recipe)


def convolution(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    image, kernel = x.view(4, 30, 8, 8), weight[:, :120].view(48, 30, 2, 2)
    return functional.conv2d(image, kernel, padding=1, recipe=recipe)


def experts(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    three = weight.view(3, 16, 160)
    return functional.grouped_linear(x, three, OFFS, recipe=recipe)


def normed(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.norm_linear(x, weight, recipe=recipe)[0]


def head(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    target = torch.arange(48) % 48
    return functional.linear_cross_entropy(x, weight, target, reduction="none", recipe=recipe)


def results(op: Callable[..., torch.Tensor], recipe: str, g_of: int) -> Grads:
    generator = torch.Generator().manual_seed(0)
    x = leaf(torch.randn(48, 160, generator=generator))
    weight = leaf(torch.randn(48, 160, generator=generator))
    y = op(recipe, x, weight)
    g = torch.randn(y.shape, generator=generator.manual_seed(g_of))
    return y.detach(), *torch.autograd.grad(y, (x, weight), g)


@for_each("op", [linear, pointwise, convolution, experts])
@for_each("mix", MIXES)
def test_each_product_is_that_of_its_recipe(
    op: Callable[..., torch.Tensor], mix: tuple[str, str, str]
) -> None:
    mixed = results(op, joined(*mix), 1)
    for i, name in enumerate(mix):
        if op is pointwise and name == "bf16":
            continue  # the vendor's convolution, which rounds its results to bf16
        assert_same_bits(mixed[i], results(op, name, 1)[i])


@for_each("mix", [("fp8", "bf16", "fp8"), ("bf16", "fp8-rowwise", "bf16"), ("fp8", "fp8", "bf16")])
def test_gradients_of_fused_ops(mix: tuple[str, str, str]) -> None:
    """The gradient of a norm follows grad_input; g of a head, whose logits are forward's, is cast
    for each product."""
    y, dx, dw = results(normed, joined(*mix), 1)
    assert_same_bits(y, results(normed, mix[0], 1)[0])
    assert_same_bits(dx, results(normed, mix[1], 1)[1])
    assert_same_bits(dw, results(normed, mix[2], 1)[2])
    assert_same_bits(results(head, joined(*mix), 1)[0], results(head, mix[0], 1)[0])
    exact = results(head, "bf16", 1)
    for got, want in zip(results(head, joined(*mix), 1), exact, strict=True):
        assert float((got - want).norm() / want.norm()) < 0.1


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def step(model: nn.Module, x: torch.Tensor) -> Grads:
    x = leaf(x)
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
NAMED = ("fp8-rowwise+gw-bf16", "bf16+gi-fp8+gw-mxfp4", "nvfp4+gi-mxfp8+gw-bf16",
         "fp8-delayed+gw-bf16", "fp8-delayed+gi-bf16+gw-mxfp8")  # fmt: skip


@for_each("fuse", [False, True])
@for_each("name", NAMED)
def test_modules(name: str, fuse: bool) -> None:
    """Fused and not; a weight that is cast once; checkpointed; copied; and near FP32."""
    exact = step(mlp(), X)
    model = mixprec.convert(mlp(), name, fuse=fuse)
    plain = step(copy.deepcopy(model), X)
    limit = 0.35 if "fp4" in name else 0.12
    for got, want in zip(plain, exact, strict=True):
        assert float((got - want).norm() / want.norm()) < limit
    with mixprec.reuse_weights(reused := copy.deepcopy(model)):
        assert_same_lists(step(reused, X), plain)
    again = Model(lambda self, x: checkpoint(self.a, x, use_reentrant=False), a=model)
    assert_same_lists(step(again, X), plain)


@for_each("name", ["fp8-delayed+gi-bf16+gw-bf16", "fp8-delayed+gw-bf16"])
def test_delayed_scales_of_roles_that_are_not_cast(name: str) -> None:
    model = mixprec.convert(mlp(), name)
    for _ in range(3):
        found = step(model, X)
        mixprec.update_scales(model)
        assert all(torch.isfinite(t).all() for t in found)
        model.zero_grad()
    layer = model[1]
    assert float(layer.scale[0]) > 0
    assert torch.isfinite(layer.scale).all()


def test_what_is_saved_for_backward() -> None:
    """x in the format of grad_weight, the weight in that of grad_input."""
    for name, x_bytes, w_bytes in (("fp8+gw-bf16", 2, 1), ("bf16+gi-fp8", 2, 1),
                                   ("bf16+gw-fp8", 1, 2), ("fp8", 1, 1)):  # fmt: skip
        x, weight = leaf(torch.randn(48, 160)), leaf(torch.randn(32, 160))
        with saved_tensors() as saved:
            functional.linear(x, weight, recipe=name)
        sizes = {t.numel(): t.element_size() for t in saved if t.dim() == 2}
        assert sizes == {48 * 160: x_bytes, 32 * 160: w_bytes}, name


def test_compiled_and_observed() -> None:
    model = mixprec.convert(mlp(), "fp8+gi-mxfp8+gw-bf16")
    seen = []
    with observed(lambda kind, name, *formats: seen.append((kind, *formats))):
        plain = step(copy.deepcopy(model), X)
    assert {*seen} == {
        ("forward", "e4m3", "e4m3"), ("grad_input", "e4m3", "e4m3"),
        ("grad_weight", "bf16", "bf16"),
    }  # fmt: skip
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert_same_lists(step(compiled, X), plain)


def test_words_and_values() -> None:
    recipe = Recipe.parse("rowwise_with_gw_hp")
    assert recipe == replace(
        RECIPES["fp8-rowwise"], name="fp8-rowwise+gw-bf16", products={"grad_weight": "bf16"}
    )
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    operands = "x e4m3/row, w e4m3/row, g e4m3/row"
    assert str(recipe) == f"fp8-rowwise: {operands}; grad_weight in bf16"
    assert [recipe.product(name).x.bits for name in GEMMS] == [8, 8, 16]
    assert Recipe.parse("FP8 + gw-fp8".replace(" ", "")) == RECIPES["fp8"]
    assert Recipe.parse("fp8+gw-mxfp8+gi-bf16").name == "fp8+gi-bf16+gw-mxfp8"
    assert (mixprec.why_not("fp8+gw-bf16") or "").startswith("no CPU multiplies in fp8")


@for_each(
    "wrong, match",
    [
        ("fp8+gw-fp16", "grad_weight must not be fp16 beside e4m3"),
        ("fp16+gi-bf16", "grad_input must not be bf16 beside fp16"),
        ("fp8+gw-fp8-delayed", "must not have delayed scaling"),
        ("fp8+gw-bf16+gw-fp8", r"\+gi-NAME, \+gw-NAME and"),
        ("fp8+gw-int8", '"int8" is not supported'),
    ],
)
def test_contradictions(wrong: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Recipe.parse(wrong)
    with pytest.raises(ValueError, match="products must be recipes of some of"):
        replace(RECIPES["fp8"], products={"forward": "bf16"})
    nested = replace(RECIPES["fp8"], name="nested", products={"grad_input": "bf16"})
    with pytest.raises(ValueError, match="must be a recipe without products, got nested"):
        replace(RECIPES["fp8"], products={"grad_weight": nested})


# Block formats: random rounding, and what is saved


ALL = (*(r for r in RECIPES.values() if r.is_block and not r.backward), *BLOCK_MIXES)


def products(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, recipe: Recipe
) -> list[torch.Tensor]:
    """y and the gradients of x and w."""
    x, w = leaf(x), leaf(w)
    y = functional.linear(x, w, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def test_the_mean_of_stochastic_gradients_is_exact() -> None:
    """Of g rounded 400 times, within 5 standard deviations; nearest is biased by far more."""
    recipe = replace(RECIPES["mxfp4"], x="e4m3", w="e4m3")
    x, w = torch.eye(32), torch.eye(32)  # exact in E4M3
    g = torch.full((32, 32), 0.3)
    g[:, 0] = 6.0  # so that the scale is 1, and 0.3 lies between 0 and 0.5
    found = torch.stack([products(x, w, g, recipe)[1] for _ in range(400)])
    deviation = 0.5 * math.sqrt(0.6 * 0.4 / (400 * 32 * 31))
    assert abs(float(found[..., 1:].mean()) - 0.3) < 5 * deviation
    assert set(found[..., 1:].unique().tolist()) == {0.0, 0.5}
    assert float(products(x, w, g, nearest(recipe))[1][:, 1:].mean()) == 0.5


def test_a_matrix_and_its_rotated_transpose_are_rounded_independently() -> None:
    """The errors of elements at one place in memory: correlated if they had the same random bits,
    and otherwise by 5 standard deviations of that of 2^14 pairs at most."""
    g, errors = normal((128, 128), torch.float32), []
    cast = operands.cast(g, "g", RECIPES["nvfp4-1x16"], None, use_t=True)
    for matrix, exact in ((cast.matrix, g), (cast.matrix_t, hadamard(g.t()))):
        rounded = dequantize_mx_op(*matrix, "nvfp4", 128, torch.float32)
        scale_inv = mixprec.quantize(exact, "e2m1", granularity="nvfp4").tensor_scale_inv
        assert torch.equal(matrix.tensor_scale_inv, scale_inv), "of its own values"
        errors.append(((rounded - exact) * exact.sign()).flatten())
    assert abs(float(torch.corrcoef(torch.stack(errors))[0, 1])) < 5 * 2**-7


SAVED = {  # shapes of x and weight, and of the matrices that are saved for each
    "linear": ((70, 33), (9, 33), (33, 70), (33, 9)),
    "norm_linear": ((70, 33), (9, 33), (33, 70), (33, 9)),
    "1x1": ((2, 5, 6, 7), (4, 5, 1, 1), (5, 84), (5, 4)),
    "3x3": ((2, 5, 6, 7), (4, 5, 3, 3), (2, 210), (4, 45)),
}


@for_each("recipe, kind", pairwise(ALL, list(SAVED)))
def test_codes_and_scales_are_what_is_saved(recipe: Recipe, kind: str) -> None:
    """x^T and w^T of a product, x and w of a convolution: never a decoded copy."""
    x_shape, w_shape, *saved = SAVED[kind]
    x, w = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
    op = getattr(functional, kind, functional.conv2d)
    with saved_tensors() as found:
        op(x, w, recipe=recipe)
    low = [t for t in found if t.dtype != torch.float32]
    assert not {torch.bfloat16, torch.float16} & {t.dtype for t in low}, "a decoded copy"
    want = 0
    for role, (rows, columns) in zip("xw", saved, strict=True):
        if recipe.hadamard and role == "x" and kind != "3x3":
            columns = -(-columns // BLOCK) * BLOCK
        per_byte = 2 if getattr(recipe, role).bits == 4 else 1
        size = 16 if getattr(recipe, f"{role}_granularity").startswith("nvfp4") else 32
        want += rows * (-(-columns // per_byte) + -(-columns // size))
    assert sum(t.nbytes for t in low) == want


def test_statistics_of_a_cast_leave_the_random_numbers_alone() -> None:
    layer = mixprec.nn.Linear(48, 8, recipe="nvfp4-1x16")
    x = torch.randn(20, 48)
    x[0, :16] = 1e-3 * torch.arange(16)
    with mixprec.stats.Monitor(layer, every=1, sqnr=True) as monitor:
        before = torch.get_rng_state()
        layer(x)
        assert torch.equal(torch.get_rng_state(), before)
        monitor.step()
    monitor.flush()
    (row,) = (row for row in monitor.records[-1]["tensors"] if row["tensor"] == "x")
    kept = mixprec.dequantize(mixprec.quantize(x, "e2m1", granularity="nvfp4"))
    assert row["sqnr"] == pytest.approx(float(sqnr(x, kept)))
    assert row["underflow"] == int(((x != 0) & (kept == 0)).sum()) / x.numel()
    assert row["scale_max"] > row["scale_min"] > 0
    assert row["overflow"] == 0


@for_each("base", ["fp8", "fp8-block", "mxfp4", "nvfp4", "nvfp4-rowwise"])
def test_backward_of_what_forward_saw(base: str) -> None:
    """In bf16: of the decoded x and w, and with "bf16" of x and w themselves."""
    x, w, g = torch.randn(40, 72), torch.randn(24, 72), torch.randn(40, 24)
    recipe = Recipe.parse(base)
    seen = [
        mixprec.dequantize(mixprec.quantize(t, fmt, granularity=granularity))
        for t, fmt, granularity in (
            (x, recipe.x, recipe.x_granularity),
            (w, recipe.w, recipe.w_granularity),
        )
    ]
    for backward, (a, b) in (("dequantized", seen), ("bf16", (x, w))):
        got = products(x, w, g, replace(recipe, name="own", backward=backward))
        _, grad_x, grad_w = products(a, b, g, Recipe.parse("bf16"))
        assert torch.equal(got[0], products(x, w, g, recipe)[0])
        assert torch.equal(got[1], grad_x)
        assert torch.equal(got[2], grad_w)
    named = replace(recipe, name="own", backward="bf16")
    assert replace(named, name=f"{base}+gi-bf16+gw-bf16") == Recipe.parse(f"{base}+gi-bf16+gw-bf16")
    own = replace(recipe, name="own", backward="dequantized", products={"grad_weight": recipe})
    assert [name for name, _ in own.products] == ["grad_weight"]
    assert Recipe.from_dict(own.to_dict()) == own


@for_each("name", ["quartet2", "tetrajet"])
def test_recipes_whose_backward_is_random(name: str) -> None:
    """The mean over seeds has the right size; odd shapes and a convolution run too."""
    x, w, g = torch.randn(70, 45), torch.randn(33, 45), torch.randn(70, 33)
    total = [torch.zeros_like(t) for t in products(x, w, g, Recipe.parse(name))]
    for seed in range(20):
        torch.manual_seed(seed)
        for sum_, t in zip(total, products(x, w, g, Recipe.parse(name)), strict=True):
            sum_ += t / 20
    for got, exact in zip(total, (x @ w.t(), g @ w, g.t() @ x), strict=True):
        assert sqnr(exact, got) > 12
        assert abs((got * exact).sum() / exact.square().sum() - 1) < 0.03
    image, kernel = torch.randn(2, 4, 6, 5, requires_grad=True), torch.randn(8, 4, 3, 3)
    y = functional.conv2d(image, kernel, recipe=name)
    y.sum().backward()
    assert image.grad is not None
    assert sqnr(torch.nn.functional.conv2d(image, kernel), y) > 10


def test_forward_in_bf16_from_some_step_on() -> None:
    model = mixprec.convert(torch.nn.Sequential(torch.nn.Linear(48, 32)), "nvfp4")
    x = torch.randn(64, 48)
    before = model(x)
    mixprec.convert(model, "bf16+gi-nvfp4+gw-nvfp4")
    exact = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    assert sqnr(exact, before) < 25
    assert sqnr(exact, model(x)) > 45
    assert model[0].recipe.product("grad_weight") == replace(RECIPES["nvfp4"], products=())
