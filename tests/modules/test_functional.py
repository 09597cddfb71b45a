"""linear and matmul: values and gradients against FP64, overflow, and what functions refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import LAYOUTS, WIDE, Layout, for_each, name, nearest, normal, pairwise, small_integers
from independent import assert_same_lists
from layer_cases import BLOCK_MIXES, OPS, leaf, linear, value

import mixprec
from mixprec import functional
from mixprec.formats import E4M3, E5M2
from mixprec.functional import matmul, mlp, operands
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import assert_close, sqnr, tolerance

FP8_MIXES = (
    Recipe("e4m3", E4M3, E4M3, E4M3),
    Recipe("e5m2", E5M2, E5M2, E5M2),
    Recipe("any scale", E4M3, E4M3, E5M2, power_of_two_scale=False),
)
# But for those whose backward products round x and w at random.
NAMED = {name: recipe for name, recipe in RECIPES.items() if not recipe.backward}
TORCHS = "nvfp4-rowwise"  # whose casts have no kernel: use_backend("cpp") refuses them
CURRENT = tuple(name for name, recipe in NAMED.items() if not recipe.is_delayed)
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
    ((2, 1, 2, 3, 13), 9),
)


# --- values --------------------------------------------------------------------------------------


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

    tensors = {"x": x, "w": w, "g": g}
    qx, qw, qg = (value(t, role, recipe) for role, t in tensors.items())
    qx_t, qw_t, qg_t = (value(t, role, recipe, transposed=True) for role, t in tensors.items())
    exact = qx @ qw.t() + (0.0 if bias is None else bias.detach().double())
    assert_close(y.detach().view(exact.shape), exact, tolerance(exact, qx, qw.t(), y.dtype))
    for leaf_, a, b in ((x, qg, qw_t), (w, qg_t.t(), qx_t)):
        assert (leaf_.grad.dtype, leaf_.grad.shape) == (leaf_.dtype, leaf_.shape)
        exact = a @ b
        assert_close(leaf_.grad.view(exact.shape), exact, tolerance(exact, a, b, leaf_.dtype))
    if bias is not None:
        assert bias.grad.dtype == bias.dtype
        rows = g.double().reshape(math.prod(g.shape[:-1]), w.shape[0])
        exact, ones = rows.sum(0), torch.ones(1, len(rows), dtype=torch.float64)
        rounded_to = torch.float32 if bias.dtype == torch.float64 else bias.dtype
        assert_close(bias.grad, exact, tolerance(exact, ones, rows, rounded_to).view(exact.shape))


@pytest.mark.parametrize("recipe", [*NAMED.values(), *FP8_MIXES, *BLOCK_MIXES], ids=name)
def test_shapes(backend: str, recipe: Recipe) -> None:
    if backend == "cpp" and recipe.name == TORCHS:
        pytest.skip(f"{TORCHS}: casts without a kernel")
    for i, (shape, n) in enumerate(X_SHAPES):
        for dtype in (WIDE[i % 3], WIDE[(i + 1) % 3]):
            x, w = normal(shape, dtype), normal((n, shape[-1]), dtype, seed=1)
            bias = normal((n,), dtype, seed=2) if dtype == WIDE[i % 3] else None
            check_against_fp64(x, w, bias, recipe)


@for_each("bias_dtype, w_dtype, x_dtype", pairwise([*WIDE, torch.float64], WIDE, WIDE))
@for_each("recipe", NAMED.values())
def test_every_gradient_has_the_dtype_of_its_tensor(
    x_dtype: torch.dtype, w_dtype: torch.dtype, bias_dtype: torch.dtype, recipe: Recipe
) -> None:
    x, w = normal((9, 16), x_dtype), normal((5, 16), w_dtype, seed=1)
    check_against_fp64(x, w, normal((5,), bias_dtype, seed=2), recipe)


@for_each("recipe", NAMED.values())
@for_each("layout", LAYOUTS)
def test_strides_do_not_matter(layout: Layout, recipe: Recipe) -> None:
    dtype = recipe.x.dtype if recipe.x.bits == 16 else torch.float32
    for shape, n in (((5, 7), 3), ((2, 3, 4, 9), 6)):
        # Small integers: exact in whatever order the kernel adds.
        shapes = shape, (n, shape[-1]), (*shape[:-1], n)
        given = [layout(small_integers(s, dtype, seed=i)) for i, s in enumerate(shapes)]
        results = []
        for x, w, g in (given, [t.clone(memory_format=torch.contiguous_format) for t in given]):
            x, w = leaf(x), leaf(w)
            y = linear(x, w, recipe=recipe)
            results.append([y, *torch.autograd.grad(y, (x, w), g)])
        assert_same_lists(*results)


def test_blackwell_needs_no_transposed_copy_with_scales_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    for capability in ((9, 0), (10, 0), (12, 0), None):
        monkeypatch.setattr(operands, "capability", lambda _, found=capability: found)
        assert operands.wants_k_major(gpu, "block128x128")
        assert operands.wants_k_major(gpu, "tensor") is (capability != (10, 0))
        assert not operands.wants_k_major(torch.device("cpu"), "tensor")
        with mixprec.use_backend("triton"):
            assert operands.wants_k_major(gpu, "tensor")


def noise(role: str, recipe: Recipe) -> float:
    """The mean square error of an element over the mean square, at most: a step of eps times the
    power of two below it, as large as the element itself, errs by step^2 / 12 to nearest and by
    twice that stochastically. A scale rounded up to a power of two makes steps no larger."""
    steps = 12 if role not in recipe.stochastic_rounding else 6
    return getattr(recipe, role).eps ** 2 / steps


def outliers(*shape: int) -> torch.Tensor:
    """Standard normal values with one in a thousand 30 times as large."""
    return torch.randn(shape) * torch.where(torch.rand(shape) < 1e-3, 30.0, 1.0)


LARGE = {  # shapes of x and weight
    "linear": ((384, 512), (256, 512)),
    "1x1": ((4, 64, 12, 12), (48, 64, 1, 1)),
    "3x3": ((4, 64, 12, 12), (48, 64, 3, 3)),
}


@for_each("kind, draw", pairwise(list(LARGE), [torch.randn, torch.rand, outliers]))
@for_each("recipe", [*NAMED.values(), *BLOCK_MIXES])
def test_signal_to_noise(recipe: Recipe, kind: str, draw: Callable[..., torch.Tensor]) -> None:
    """Against FP32: independent errors of two operands add up."""
    op, exact = OPS[kind][0], F.linear if kind == "linear" else F.conv2d
    x, w = (leaf(draw(*shape)) for shape in LARGE[kind])
    y = exact(x, w)
    g = draw(*y.shape)
    want = y, *torch.autograd.grad(y, (x, w), g)
    y = op(x, w, recipe=recipe)
    got = y, *torch.autograd.grad(y, (x, w), g)
    # Values of one sign add up faster than errors, which 16-bit results limit. Beside an outlier,
    # 4 bits have few elements that are not subnormal.
    gain = {torch.rand: 10.0 if recipe.is_scaled else 0.0, outliers: -2.0}.get(draw, 0.0)
    for a, b, roles in zip(want, got, ("xw", "gw", "gx"), strict=True):
        assert sqnr(a, b) > gain - 10 * math.log10(sum(noise(role, recipe) for role in roles))


@for_each("recipe", CURRENT)
def test_matmul_is_linear_without_the_transpose(recipe: str) -> None:
    recipe = nearest(recipe)
    a, b = leaf(normal((2, 3, 16), torch.float32)), leaf(normal((16, 5), torch.float32, seed=1))
    x, w = leaf(a), leaf(b.t().contiguous())
    g = normal((2, 3, 5), torch.float32, seed=2)
    c, y = matmul(a, b, recipe=recipe), linear(x, w, recipe=recipe)
    grad_a, grad_b = torch.autograd.grad(c, (a, b), g)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    for got, want in ((c.detach(), y.detach()), (grad_a, grad_x), (grad_b, grad_w.t())):
        assert_close(got, want, 2e-6)
    assert matmul(a, b, recipe=recipe, out_dtype=torch.float16).dtype == torch.float16


@for_each("recipe", CURRENT)
def test_the_gradient_has_the_strides_of_its_weight_and_the_same_bits(recipe: str) -> None:
    recipe = nearest(recipe)
    x, down = normal((130, 64), torch.bfloat16), normal((64, 96), torch.float32, seed=3)
    by_columns = leaf(normal((64, 96), torch.float32, seed=1).t())
    by_rows = leaf(by_columns.detach().contiguous())
    for op in (linear, lambda x, w, recipe: mlp(x, w, down, act="silu", recipe=recipe)):
        grads = []
        for weight in (by_rows, by_columns):
            y = op(x, weight, recipe=recipe)
            g = normal(tuple(y.shape), y.dtype, seed=2)
            grads += torch.autograd.grad(y, weight, g)
            exact = recipe.power_of_two_scale and not recipe.is_block
            assert grads[-1].stride() == (weight if exact else by_rows).stride()
        assert torch.equal(*grads)


# --- overflow stays visible ----------------------------------------------------------------------


@for_each("number", [math.inf, -math.inf, math.nan])
@for_each(
    "recipe, kind", [*pairwise(list(NAMED), list(OPS)), *((mix, "linear") for mix in FP8_MIXES)]
)
def test_non_finite_values_reach_the_gradients(
    backend: str, recipe: str | Recipe, kind: str, number: float
) -> None:
    if backend == "cpp" and recipe == TORCHS:
        return
    op, x_shape, w_shape = OPS[kind]
    bias = leaf(torch.zeros(8))
    y_shape = op(torch.zeros(x_shape), torch.zeros(w_shape), recipe=recipe).shape
    shapes = {"x": x_shape, "w": w_shape, "g": tuple(y_shape)}
    for where, results in {"x": "yw", "w": "yx", "g": "xwb"}.items():
        data = {k: normal(s, torch.float32, seed=i) for i, (k, s) in enumerate(shapes.items())}
        data[where].view(-1)[-1] = number
        x, w = leaf(data["x"]), leaf(data["w"])
        y = op(x, w, bias, recipe=recipe)
        grads = torch.autograd.grad(y, (x, w, bias), data["g"])
        got = dict(zip("yxwb", (y, *grads), strict=True))
        for result in results:
            assert not got[result].isfinite().all(), f"{number} in {where} is lost in {result}"


def test_overflow_in_a_cast() -> None:
    """As IEEE 754 rounds: a gradient above fp16's maximum is Inf in fp16, and so is a result."""
    x, w = leaf(normal((4, 16), torch.float32)), leaf(normal((8, 16), torch.float32, seed=1))
    linear(x, w, recipe="fp16").backward(torch.full((4, 8), 1e6))
    assert not x.grad.isfinite().any()
    assert not w.grad.isfinite().any()
    half, twos = leaf(torch.ones(1, 16, dtype=torch.float16)), torch.full((1, 16), 2.0)
    linear(half, twos, out_dtype=torch.float32).backward(torch.full((1, 1), 2.0**16))
    assert half.grad.isposinf().all()


# --- errors --------------------------------------------------------------------------------------


W = torch.zeros(16, 8)
CLIP = replace(RECIPES["fp16"], clip_activations=True)
GOOD: dict[str, dict[str, object]] = {
    "linear": {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4)},
    "conv2d": {"x": torch.zeros(1, 4, 5, 5), "weight": torch.zeros(6, 4, 3, 3)},
    "matmul": {"a": torch.zeros(2, 4), "b": torch.zeros(4, 3), "recipe": "fp8"},
    "norm_linear": {"x": torch.zeros(3, 8), "weight": W},
    "mlp": {"x": torch.zeros(3, 8), "up": W, "down": W.t()},
    "attention": dict.fromkeys(("q", "k", "v"), torch.zeros(1, 2, 3, 8)),
}


@for_each(
    "op, change, match",
    [
        ("linear", {"x": [1.0]}, "x must be a torch.Tensor, got list"),
        ("linear", {"x": torch.tensor(1.0)}, r"x must be \[..., K\] with K = 4"),
        ("linear", {"x": torch.zeros(2, 4).double()}, "x must have dtype float32"),
        ("linear", {"x": torch.zeros(2, 4).cfloat()}, "x must have .* torch.complex64"),
        ("linear", {"x": torch.zeros(2, 4).to_sparse()}, "x must be a dense tensor, got layout"),
        ("linear", {"weight": torch.zeros(3, 4, 1)}, r"weight must be \[N, K\]"),
        ("linear", {"weight": torch.zeros(3, 4).double()}, "weight must have dtype"),
        ("linear", {"weight": torch.zeros(3, 4, device="meta")}, "weight must be on x's device"),
        ("linear", {"bias": torch.zeros(4)}, r"bias must have shape \[N\] = \(3,\), got \(4,\)"),
        ("linear", {"bias": torch.zeros(3).long()}, "bias must have dtype"),
        ("linear", {"out_dtype": torch.float64}, "out_dtype must be float32, bfloat16"),
        ("conv2d", {"x": [1.0]}, "x must be a torch.Tensor, got list"),
        ("conv2d", {"x": torch.zeros(4, 5)}, r"x must be \[B, C, H, W\] or \[C, H, W\]"),
        ("conv2d", {"x": torch.zeros(1, 3, 5, 5)}, r"with C = 4 .* got shape \(1, 3, 5, 5\)"),
        ("conv2d", {"x": torch.zeros(1, 4, 5, 5).double()}, "x must have dtype float32"),
        ("conv2d", {"weight": torch.zeros(6, 4)}, r"weight must be \[O, C / groups, kh, kw\]"),
        ("conv2d", {"weight": torch.zeros(6, 4, 3, 3).long()}, "weight must have dtype"),
        ("conv2d", {"weight": torch.zeros(6, 4, 3, 3, device="meta")}, "weight must be on x's"),
        ("conv2d", {"bias": torch.zeros(4)}, r"bias must have shape \[O\] = \(6,\), got \(4,\)"),
        ("conv2d", {"stride": 0}, "stride must be an int of 1 or more, or a pair of them, got 0"),
        ("conv2d", {"dilation": 1.5}, "dilation must be an int of 1 or more"),
        ("conv2d", {"padding": (-1, 0)}, "padding must be an int of 0 or more"),
        ("conv2d", {"padding": "full"}, 'padding must be "same", "valid" or a number, got'),
        ("conv2d", {"padding": "same", "stride": 2}, r'padding "same" needs a stride of 1'),
        ("conv2d", {"groups": 0}, "groups must be an int of 1 or more that divides O = 6, got 0"),
        ("conv2d", {"groups": 4}, "that divides O = 6, got 4"),
        ("conv2d", {"recipe": "fp8-delayed"}, "delayed scaling, whose .* use mixprec.nn.Conv2d"),
        ("conv2d", {"clipped": torch.zeros(2)}, "clipped must hold one int64"),
        ("linear", {"recipe": CLIP, "clipped": torch.zeros(())}, "clipped must hold one"),
        ("matmul", {"b": torch.zeros(3, 4)}, r"a must be \[..., K\] and b \[K, N\]"),
        ("matmul", {"b": torch.zeros(1, 4, 3)}, r"a must be \[..., K\] and b \[K, N\]"),
        ("matmul", {"b": torch.zeros(4, 3).double()}, "b must have dtype"),
        ("norm_linear", {"x": torch.zeros(3, 4)}, r"x must be \[..., K\] with K = 8"),
        ("norm_linear", {"norm": "batch"}, 'norm must be "rms"'),
        ("norm_linear", {"recipe": "fp8-delayed"}, "fp8-delayed keeps state"),
        ("mlp", {"x": torch.zeros(3, 8).double()}, "x must have dtype float32"),
        ("mlp", {"act": "tanh"}, "act must be one of silu"),
        ("mlp", {"act": "silu", "down": W}, "up and gate must be"),
        ("mlp", {"norm_weight": W[0]}, "norm_weight must be None without norm"),
        ("mlp", {"gate_bias": W[0]}, "gate_bias must be None without gate"),
        ("attention", {"k": None}, "k must be a torch.Tensor, got NoneType"),
    ],
)
def test_errors_name_the_argument(op: str, change: dict[str, object], match: str) -> None:
    error = TypeError if "torch.Tensor, got" in match else ValueError
    with pytest.raises(error, match=f"^{op}: .*{match}"):
        getattr(functional, op)(**GOOD[op] | change)
