"""linear and matmul: gradients against FP64, what is saved, what is skipped, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, for_each, name, nearest, normal, pairwise, small_integers
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import functional
from mixprec.formats import E4M3, E5M2
from mixprec.functional import _observed, _products, matmul, observed, operands
from mixprec.functional.operands import Delayed
from mixprec.ops._reference.gemm_scales import Operands
from mixprec.ops._reference.hadamard import hadamard
from mixprec.ops.delayed_scales import UNUSED
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import assert_close, sqnr, tolerance

NAMES = tuple(RECIPES)
FP8_MIXES = (
    Recipe("e4m3", E4M3, E4M3, E4M3),
    Recipe("e5m2", E5M2, E5M2, E5M2),
    Recipe("any scale", E4M3, E4M3, E5M2, power_of_two_scale=False),
)
CURRENT = tuple(name for name, recipe in RECIPES.items() if not recipe.is_delayed)
X_SHAPES = (
    ((0, 16), 5),
    ((4, 0, 16), 5),
    ((3, 0), 5),  # K = 0: y is the bias
    ((3, 7), 0),
    ((1,), 1),
    ((17,), 3),
    ((1, 16), 8),
    ((5, 7), 3),
    ((33, 64), 48),
    ((130, 129), 257),  # blocks of 128, and one more
    ((2, 3, 16), 5),
    ((3, 2, 5, 13), 11),
    ((2, 1, 2, 3, 8), 9),
)


def linear(*args: object, recipe: str | Recipe = "fp8", **options: object) -> torch.Tensor:
    """functional.linear, with scales that have not been used yet where the recipe wants some.

    The next backward pass rounds stochastically with the same seeds each time.
    """
    if not torch.compiler.is_compiling():
        torch.manual_seed(0)
    if Recipe.parse(recipe).is_delayed:
        options["delayed"] = Delayed(torch.zeros(3), torch.full((2,), UNUSED), torch.tensor(UNUSED))
    return functional.linear(*args, recipe=recipe, **options)


def conv2d(*args: object, recipe: str = "fp8", **options: object) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        torch.manual_seed(0)
    if Recipe.parse(recipe).is_delayed:
        options["delayed"] = Delayed(torch.zeros(2), torch.tensor(UNUSED), torch.tensor(UNUSED))
    return functional.conv2d(*args, recipe=recipe, **options)


# The function, and shapes of x and weight that fit.
OPS = {
    "linear": (linear, (6, 16), (8, 16)),
    "1x1": (conv2d, (2, 4, 6, 5), (8, 4, 1, 1)),
    "3x3": (conv2d, (2, 4, 6, 5), (8, 4, 3, 3)),
}


def value(t: torch.Tensor, role: str, recipe: Recipe, *, transposed: bool = False) -> torch.Tensor:
    """The numbers that a tensor stands for once it is cast, [rows, columns] in FP64.

    transposed: as an operand of the GEMM that sums over its rows, where scales lie along these.
    """
    fmt, granularity = getattr(recipe, role), getattr(recipe, f"{role}_granularity")
    rows = t.detach().reshape(math.prod(t.shape[:-1]), t.shape[-1])
    if fmt.bits == 16:
        return rows.to(fmt.dtype).double()
    rows = rows.t() if transposed else rows
    if recipe.is_block:
        rows = hadamard(rows) if transposed and recipe.hadamard and role != "w" else rows
        result = mixprec.dequantize(mixprec.quantize(rows, fmt, granularity=granularity)).double()
        return result.t() if transposed else result
    power_of_two = recipe.power_of_two_scale
    q = mixprec.quantize(rows, fmt, granularity=granularity, power_of_two_scale=power_of_two)
    scale_inv = q.scale_inv.double()
    if granularity != "tensor":  # of each element
        wide = torch.ones(rows.shape, dtype=fmt.dtype)
        scale_inv = mixprec.dequantize(q._replace(data=wide)).double()
    result = q.data.double() * scale_inv
    return result.t() if transposed else result


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def plant(t: torch.Tensor, number: float) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[-1] = number
    return t


# --- values ----------------------------------------------------------------------------------


def check_against_fp64(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe
) -> None:
    """y and all gradients lie within the derived tolerance of FP64 sums of the cast operands."""
    x, w, recipe = leaf(x), leaf(w), nearest(recipe)
    bias = None if bias is None else leaf(bias)
    y = linear(x, w, bias, recipe=recipe)
    assert (y.shape, y.dtype) == ((*x.shape[:-1], w.shape[0]), x.dtype)
    g = normal(tuple(y.shape), y.dtype, seed=3)
    y.backward(g)

    of = (("x", x), ("w", w), ("g", g))
    qx, qw, qg = (value(t, role, recipe) for role, t in of)
    qx_t, qw_t, qg_t = (value(t, role, recipe, transposed=True) for role, t in of)
    exact = qx @ qw.t() + (0.0 if bias is None else bias.detach().double())
    assert_close(y.detach().view(exact.shape), exact, tolerance(exact, qx, qw.t(), y.dtype))
    for grad, of, a, b in ((x.grad, x, qg, qw_t), (w.grad, w, qg_t.t(), qx_t)):
        assert grad is not None
        assert (grad.dtype, grad.shape) == (of.dtype, of.shape)
        exact = a @ b
        assert_close(grad.view(exact.shape), exact, tolerance(exact, a, b, grad.dtype))
    if bias is not None:
        assert bias.grad is not None
        assert bias.grad.dtype == bias.dtype
        rows = g.double().reshape(-1, w.shape[0]) if g.numel() else torch.zeros(0, w.shape[0])
        ones = torch.ones(1, rows.shape[0], dtype=torch.float64)
        exact = rows.double().sum(0)
        rounded_to = torch.float32 if bias.dtype == torch.float64 else bias.dtype
        bound = tolerance(exact, ones, rows, rounded_to)
        assert_close(bias.grad, exact, bound.view(exact.shape))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *FP8_MIXES], ids=name)
def test_shapes(backend: str, recipe: Recipe) -> None:
    for i, (shape, n) in enumerate(X_SHAPES):
        for dtype in (WIDE[i % 3], WIDE[(i + 1) % 3]):
            x, w = normal(shape, dtype), normal((n, shape[-1]), dtype, seed=1)
            bias = normal((n,), dtype, seed=2) if dtype == WIDE[i % 3] else None
            check_against_fp64(x, w, bias, recipe)


@for_each("bias_dtype, w_dtype, x_dtype", pairwise([*WIDE, torch.float64], WIDE, WIDE))
@for_each("recipe", RECIPES.values())
def test_every_gradient_has_the_dtype_of_its_tensor(
    x_dtype: torch.dtype, w_dtype: torch.dtype, bias_dtype: torch.dtype, recipe: Recipe
) -> None:
    x, w = normal((9, 16), x_dtype), normal((5, 16), w_dtype, seed=1)
    check_against_fp64(x, w, normal((5,), bias_dtype, seed=2), recipe)


@for_each("recipe", RECIPES.values())
@for_each("layout", LAYOUTS)
def test_strides_do_not_matter(layout: Layout, recipe: Recipe) -> None:
    dtype = recipe.x.dtype if recipe.x.bits == 16 else torch.float32
    for shape, n in (((5, 7), 3), ((2, 3, 16), 5), ((2, 3, 4, 9), 6)):
        # Small integers: exact in whatever order the kernel adds.
        shapes = shape, (n, shape[-1]), (*shape[:-1], n)
        given = [layout(small_integers(s, dtype, seed=i)) for i, s in enumerate(shapes)]
        results = []
        for x, w, g in (given, [t.clone(memory_format=torch.contiguous_format) for t in given]):
            x, w = leaf(x), leaf(w)
            y = linear(x, w, recipe=recipe)
            results.append([y, *torch.autograd.grad(y, (x, w), g)])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_transposed_copies_where_the_device_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 tensor cores read operands with K contiguous: the same numbers from another layout."""
    gemm, seen = _products.gemm, []

    def spy(given: Operands, *args: object) -> object:
        seen.append((given.a, given.b))
        return gemm(given, *args)

    def run() -> list[torch.Tensor]:
        x = leaf(small_integers((2, 3, 16), torch.float32))
        w = leaf(small_integers((5, 16), torch.float32, seed=1))
        y = linear(x, w)
        return [y, *torch.autograd.grad(y, (x, w), small_integers((2, 3, 5), y.dtype, seed=2))]

    strided = run()
    monkeypatch.setattr(operands, "_wants_k_major", lambda device_type: True)
    monkeypatch.setattr(_products, "gemm", spy)
    copied = run()
    assert len(seen) == 3
    for a, b in seen:
        assert a.stride(1) == 1, "a [M, K] is not K-major"
        assert b.stride(0) == 1, "b [K, N] is not K-major"
    for got, want in zip(copied, strided, strict=True):
        assert torch.equal(got, want)


def test_weight_gradient_of_an_fp32_weight_is_not_rounded_to_16_bits() -> None:
    x, w = leaf(normal((999, 32), torch.bfloat16)), leaf(normal((16, 32), torch.float32, seed=1))
    for recipe in NAMES:
        w.grad = None
        linear(x, w, recipe=recipe).backward(normal((999, 16), torch.bfloat16, seed=2))
        assert not torch.equal(w.grad, w.grad.bfloat16().float())
        assert not torch.equal(w.grad, w.grad.half().float())


@for_each("kind", OPS)
@for_each("out_dtype", WIDE)
def test_out_dtype(out_dtype: torch.dtype, kind: str) -> None:
    op, x_shape, w_shape = OPS[kind]
    for recipe in NAMES:
        x, w = leaf(normal(x_shape, torch.bfloat16)), leaf(normal(w_shape, torch.bfloat16, seed=1))
        y = op(x, w, recipe=recipe, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        y.backward(torch.ones_like(y))
        assert x.grad.dtype == w.grad.dtype == torch.bfloat16


@for_each("recipe", CURRENT)
def test_matmul_is_linear_without_the_transpose(recipe: str) -> None:
    recipe = nearest(recipe)
    a, b = leaf(normal((2, 3, 16), torch.float32)), leaf(normal((16, 5), torch.float32, seed=1))
    x, w = leaf(a), leaf(b.t().contiguous())
    g = normal((2, 3, 5), torch.float32, seed=2)
    c, y = matmul(a, b, recipe=recipe), linear(x, w, recipe=recipe)
    c.backward(g)
    y.backward(g)
    assert_close(c.detach(), y.detach(), 2e-6)
    assert_close(a.grad, x.grad, 2e-6)
    assert b.grad.shape == b.shape
    assert_close(b.grad, w.grad.t(), 2e-6)
    assert matmul(a, b, recipe=recipe, out_dtype=torch.float16).dtype == torch.float16


# --- overflow stays visible ------------------------------------------------------------------


@for_each("number", [math.inf, -math.inf, math.nan])
@for_each("recipe, kind", [*pairwise(NAMES, list(OPS)), *((mix, "linear") for mix in FP8_MIXES)])
def test_non_finite_values_reach_the_gradients(
    backend: str, recipe: str | Recipe, kind: str, number: float
) -> None:
    op, x_shape, w_shape = OPS[kind]
    bias = leaf(torch.zeros(8))
    y_shape = op(torch.zeros(x_shape), torch.zeros(w_shape), recipe=recipe).shape
    shapes = {"x": x_shape, "w": w_shape, "g": tuple(y_shape)}
    for where, results in {"x": "yw", "w": "yx", "g": "xwb"}.items():
        data = {k: normal(s, torch.float32, seed=i) for i, (k, s) in enumerate(shapes.items())}
        data[where] = plant(data[where], number)
        x, w = leaf(data["x"]), leaf(data["w"])
        y = op(x, w, bias, recipe=recipe)
        grads = torch.autograd.grad(y, (x, w, bias), data["g"])
        got = dict(zip("yxwb", (y, *grads), strict=True))
        for result in results:
            assert not got[result].isfinite().all(), f"{number} in {where} is lost in {result}"


def test_overflow_in_a_cast() -> None:
    """A gradient above fp16's maximum is Inf in fp16 and stays a number in scaled FP8."""
    x, w = leaf(normal((4, 16), torch.float32)), leaf(normal((8, 16), torch.float32, seed=1))
    g = plant(normal((4, 8), torch.float32, seed=2), 1e6)
    linear(x, w, recipe="fp16").backward(g)
    assert not x.grad.isfinite().all()
    assert not w.grad.isfinite().all()
    x.grad = w.grad = None
    linear(x, w, recipe="fp8").backward(g)
    assert sqnr(g.double() @ w.detach().double(), x.grad) >= 18
    # The result is rounded to the dtype of its tensor, as IEEE 754 says: 2^17 is Inf in fp16.
    half = leaf(torch.ones(1, 16, dtype=torch.float16))
    linear(half, torch.full((1, 16), 2.0), out_dtype=torch.float32).backward(
        torch.full((1, 1), 2.0**16)
    )
    assert half.grad.isposinf().all()


# --- what is saved and what is skipped -------------------------------------------------------


def saved_by(
    x: torch.Tensor, w: torch.Tensor, recipe: str | Recipe, op: Callable = linear
) -> list[tuple[torch.dtype, int, int]]:
    """(dtype, elements, storage address) of what op saves for backward."""
    saved: list[tuple[torch.dtype, int, int]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append((t.dtype, t.numel(), t.untyped_storage().data_ptr()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        op(x, w, leaf(torch.zeros(w.shape[0])), recipe=recipe)
    return saved


@for_each("recipe", ["bf16", "fp16"])
def test_16_bits_save_the_tensors_themselves_or_a_16_bit_copy(recipe: str) -> None:
    dtype = Recipe.parse(recipe).x.dtype
    x, w = leaf(normal((6, 4, 16), dtype)), leaf(normal((8, 16), dtype))
    assert {a for _, _, a in saved_by(x, w, recipe)} == {x.data_ptr(), w.data_ptr()}
    saved = saved_by(leaf(x.float()), leaf(w.float()), recipe)
    assert sum(d.itemsize * n for d, n, _ in saved) == 2 * (x.numel() + w.numel())


@for_each("recipe, kind", pairwise(NAMES, list(OPS)))
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
            y = op(x, w, bias, recipe=recipe, name="block.0")
            assert seen == [("forward", "block.0", fx, fw)]
            y.backward(torch.ones_like(y))
        want = [("grad_input", "block.0", fg, fw)] if x_grad else []
        want += [("grad_weight", "block.0", fg, fx)] if w_grad else []
        assert seen[1:] == want
        assert (x.grad is None, w.grad is None) == (not x_grad, not w_grad)
        assert (bias.grad is None) == (not bias_grad)
        if parsed.is_block:
            continue  # tests/modules/test_block_recipes.py counts what they save
        saved = [(d, n) for d, n, _ in saved_by(x, w, recipe, op) if d != torch.float32]
        assert sum(n for _, n in saved) == w.numel() * x_grad + x.numel() * w_grad
        assert all(d.itemsize == parsed.x.bits // 8 for d, _ in saved)


def test_saved_16_bit_tensors_are_guarded_against_being_overwritten() -> None:
    x = normal((6, 16), torch.bfloat16)
    w = leaf(normal((8, 16), torch.bfloat16))
    y = linear(x, w, recipe="bf16")
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x = normal((6, 16), torch.bfloat16)
    y = linear(x, w, recipe="fp8")  # saved its own bytes
    x.zero_()
    y.sum().backward()
    assert w.grad.norm() > 0


def test_observers_nest_and_end_with_their_block() -> None:
    x, w = normal((2, 4), torch.float32), normal((3, 4), torch.float32)
    outer: list[object] = []
    inner: list[object] = []

    def fail(*call: object) -> None:
        inner.append(call)
        raise KeyError

    with observed(lambda *call: outer.append(call)):
        with pytest.raises(KeyError), observed(fail):
            linear(x, w)
        linear(x, w)
    linear(x, w)
    assert (len(outer), len(inner)) == (1, 1)
    assert _observed._observer is None


# --- together with the rest of torch ---------------------------------------------------------


def derivatives(op: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """First, second and third derivatives of a sum of op(x, weight, bias)."""
    y = op(*tensors).sin().sum()
    found: list[torch.Tensor] = []
    for order in range(3):
        grads = torch.autograd.grad(y, tensors, create_graph=order < 2)
        found += grads
        y = sum((grad / grad.detach().norm()).square().sum() for grad in grads)
    return found


@for_each("recipe, kind", pairwise(NAMES, list(OPS)))
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
        assert sqnr(exact, ours) > least


@for_each("kind", OPS)
def test_a_second_derivative_is_never_left_out(kind: str) -> None:
    op, x_shape, w_shape = OPS[kind]
    x, w = leaf(normal(x_shape, torch.float32)), leaf(normal(w_shape, torch.float32))
    with pytest.raises(RuntimeError, match=r"create_graph=True: .*twice_differentiable\(\)"):
        torch.autograd.grad(op(x, w).sum(), x, create_graph=True)


def test_a_gradient_penalty_of_a_model() -> None:
    """A loss that is linear in y, a recomputed block, an output that is saturated."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU()) for _ in range(2)]
    model, x = torch.nn.Sequential(*blocks), leaf(normal((4, 16), torch.float32))
    found = []
    for recipe in (None, "fp16"):
        if recipe:
            mixprec.convert(model, dataclasses.replace(Recipe.parse(recipe), clip_activations=True))
        with functional.twice_differentiable():
            y = checkpoint(model[0], x, use_reentrant=False)
            (grad,) = torch.autograd.grad(model[1](y).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), list(model.parameters())[:-1]))
    for exact, ours in zip(*found, strict=True):
        assert sqnr(exact, ours) > 35


def test_layers_without_a_recipe_have_all_derivatives() -> None:
    layer, x = mixprec.nn.Linear(8, 4), leaf(normal((3, 8), torch.float32))
    with mixprec.autocast(enabled=False):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        assert torch.vmap(layer)(x.detach()).shape == (3, 4)
    grad.square().sum().backward()
    assert layer.weight.grad.any()


@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("recipe, kind", pairwise(NAMES, list(OPS)))
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
        for a, b in zip((y, *got), (plain, *want), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *((n, "linear") for n in NAMES if n not in ("mxfp8", "mxfp4")),  # nvfp4 has all they have
        *(("fp8", "1x1"), ("fp8-block", "3x3")),
    ],
)
def test_compiles_without_graph_breaks(recipe: str, kind: str, fresh_compiler: None) -> None:
    op, x_shape, w_shape = OPS[kind]

    def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(op(x, w, bias, recipe=recipe))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    w, bias = normal(w_shape, torch.float32, seed=1), normal((8,), torch.float32, seed=2)
    for more in (0, 5):  # the second size is traced with symbolic shapes
        shape = (x_shape[0] + more, *x_shape[1:2], *(n + more for n in x_shape[2:]))
        tensors = [leaf(t) for t in (normal(shape, torch.float32), w, bias)]
        results = []
        for run in (step, compiled):
            torch.manual_seed(0)
            y = run(*tensors)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@for_each(
    "change, error, match",
    [
        ({"x": [1.0]}, TypeError, "linear: x must be a torch.Tensor, got list"),
        ({"x": torch.tensor(1.0)}, ValueError, r"linear: x must be \[..., K\] with K = 4"),
        ({"x": torch.zeros(2, 5)}, ValueError, r"K = 4 .* got shape \(2, 5\)"),
        ({"x": torch.zeros(2, 4).double()}, ValueError, "linear: x must have dtype float32"),
        ({"x": torch.zeros(2, 4).long()}, ValueError, "linear: x must have dtype float32"),
        ({"weight": torch.zeros(3, 4, 1)}, ValueError, r"linear: weight must be \[N, K\]"),
        ({"weight": torch.zeros(3, 4).double()}, ValueError, "linear: weight must have dtype"),
        ({"weight": torch.zeros(3, 4, device="meta")}, ValueError, "weight must be on x's device"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must have shape \[N\] = \(3,\), got \(4,\)"),
        ({"bias": torch.zeros(3).long()}, ValueError, "linear: bias must have dtype"),
        ({"out_dtype": torch.float64}, ValueError, "linear: out_dtype must be float32, bfloat16"),
        ({"recipe": "fp9"}, ValueError, 'recipe must be "bf16"'),
    ],
)
def test_errors_name_the_argument(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    args: dict[str, object] = {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": None}
    with pytest.raises(error, match=match):
        linear(**(args | change))


def test_matmul_errors() -> None:
    a = torch.zeros(2, 4)
    for b in (torch.zeros(3, 4), torch.zeros(1, 4, 3)):
        with pytest.raises(ValueError, match=r"matmul: a must be \[..., K\] and b \[K, N\]"):
            matmul(a, b, recipe="fp8")
    with pytest.raises(ValueError, match="matmul: b must have dtype"):
        matmul(a, torch.zeros(4, 3).double(), recipe="fp8")
