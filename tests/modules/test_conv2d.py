"""functional.conv2d: against FP64, against torch's own in 16 bits, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import WIDE, every_second, for_each, name, nearest, normal, permuted
from layer_cases import conv2d, leaf, linear, value

from mixprec.formats import E4M3, E5M2
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import assert_close

LOW = tuple(name for name, recipe in RECIPES.items() if not recipe.is_scaled)
SCALED = tuple(name for name, recipe in RECIPES.items() if recipe.is_scaled)
MIXES = (
    Recipe("e5m2", E5M2, E5M2, E5M2),
    Recipe("rows of w", E4M3, E4M3, E5M2, w_granularity="row"),
    Recipe("squares", E4M3, E4M3, E4M3, x_granularity="block128x128"),
)
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((0, 8, 9, 7), (16, 8, 3, 3), {}),  # no sample
    ((2, 8, 9, 7), (16, 8, 3, 3), {"padding": 1}),
    ((2, 8, 9, 7), (16, 8, 3, 3), {"stride": 2, "padding": (1, 0)}),
    ((2, 8, 9, 9), (6, 8, 3, 3), {"dilation": (2, 1), "padding": 2}),
    ((3, 8, 9, 7), (12, 2, 3, 3), {"groups": 4, "padding": "same"}),
    ((2, 9, 9, 7), (9, 1, 3, 3), {"groups": 9, "padding": 1}),  # depthwise
    ((2, 4, 9, 7), (6, 4, 2, 4), {"padding": "same"}),  # more zeros at one end
    ((2, 4, 9, 7), (6, 4, 1, 5), {"padding": (0, 2), "stride": (2, 1)}),
    ((2, 8, 5, 7), (6, 8, 1, 1), {"padding": 1}),
    ((2, 8, 5, 7), (6, 4, 1, 1), {"groups": 2}),
    ((8, 9, 7), (16, 8, 3, 3), {"padding": "valid"}),
    ((3, 40, 13, 11), (24, 40, 3, 3), {"padding": 1}),  # more than one block of 128
    ((1, 4, 3, 3), (6, 4, 3, 3), {}),  # one output
)
POINTWISE: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((0, 8, 5, 7), (6, 8, 1, 1), {}),
    ((2, 8, 5, 7), (6, 8, 1, 1), {"padding": "same"}),
    ((2, 8, 9, 7), (6, 8, 1, 1), {"stride": (2, 3), "padding": "valid", "dilation": 2}),
    ((2, 160, 5, 7), (6, 160, 1, 1), {}),
    ((8, 5, 7), (6, 8, 1, 1), {"stride": 2}),
    ((2, 8, 1, 1), (6, 8, 1, 1), {}),
)


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


LAYOUTS = (torch.Tensor.contiguous, channels_last, permuted, every_second)


def operands_of(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias, which require gradients."""
    shapes = x_shape, w_shape, w_shape[:1]
    x, w, bias = (leaf(normal(shape, dtype, seed=i)) for i, shape in enumerate(shapes))
    return x, w, bias


def decoded(t: torch.Tensor, role: str, recipe: Recipe) -> torch.Tensor:
    """What a tensor stands for once it is cast as a matrix [first dimension, the rest], in bf16."""
    return value(t.flatten(1), role, recipe).bfloat16().double().reshape(t.shape)


gradients = torch.autograd.grad


# --- values ----------------------------------------------------------------------------------


# bf16 operands, and a bias, are FP32 inside of the convolution where torch's own is slow.
SLOW = not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bound(exact: torch.Tensor, magnitude: torch.Tensor, count: int, out: torch.dtype) -> object:
    """Of a sum of `count` products in FP32 that is rounded to bf16 and then to `out`."""
    rounding = torch.finfo(torch.bfloat16).eps + torch.finfo(out).eps
    return rounding * exact.abs() + 4 * count * 2.0**-24 * magnitude + torch.finfo(out).tiny


def assert_memory_format(y: torch.Tensor, theirs: torch.Tensor) -> None:
    if y.numel() and y.shape[-1] * y.shape[-2] > 1:
        assert y.stride() == theirs.stride()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("recipe", [*(nearest(n) for n in SCALED), *MIXES], ids=name)
@for_each("layout", LAYOUTS)
def test_against_fp64(layout: Callable[..., torch.Tensor], recipe: Recipe) -> None:
    """A convolution of the dequantized operands, forward and backward, within its roundings."""
    for i, (x_shape, w_shape, options) in enumerate(SHAPES):
        dtype = WIDE[i % 3]
        x, w, bias = operands_of(x_shape, w_shape, dtype)
        y = conv2d(leaf_x := leaf(layout(x.detach())), w, bias, recipe=recipe, **options)
        g = normal(tuple(y.shape), dtype, seed=3)
        got = [y.detach(), *gradients(y, (leaf_x, w, bias), layout(g))]
        assert_memory_format(y, F.conv2d(leaf_x, w, **options))
        assert [t.dtype for t in got] == [dtype] * 4

        x4, g4 = (t.detach().reshape(-1, *t.shape[-3:]) for t in (x, g))
        if options.get("padding") == "same" and w_shape[2] % 2 == 0:
            x4 = F.pad(x4, (0, 1, 0, 1))  # changes blocks, so it comes before the cast
            options = {**options, "padding": tuple((k - 1) // 2 for k in w_shape[2:])}

        def products(*tensors: torch.Tensor, options: dict[str, Any] = options) -> list:
            qx, qw, b, qg = map(leaf, tensors)
            y = F.conv2d(qx, qw, b, **options)
            return [y.detach(), *gradients(y, (qx, qw), qg)]

        b16 = bias.detach().to(torch.float32 if SLOW else torch.bfloat16).double()
        qx, qw, qg = (decoded(t, role, recipe) for t, role in ((x4, "x"), (w, "w"), (g4, "g")))
        exact = products(qx, qw, b16, qg)
        sizes = products(*(t.abs() for t in (qx, qw, b16, qg)))
        counts = (w[0].numel() + 1, w_shape[0] * w[0, 0].numel(), g4[:, 0].numel())
        for t, e, size, count in zip(got[:3], exact, sizes, counts, strict=True):
            limit = bound(e, size, count, dtype)
            # Without the zeros that were added to x, and without the dimension of a single sample.
            e, limit = (r[..., : t.shape[-2], : t.shape[-1]].reshape(t.shape) for r in (e, limit))
            assert_close(t, e, limit)
        limit = 2 * torch.finfo(dtype).eps * g4.double().abs().sum((0, 2, 3)) + 1e-6
        assert_close(got[3], g4.double().sum((0, 2, 3)), limit)


@pytest.mark.parametrize("recipe", [nearest(n) for n in SCALED], ids=name)
@for_each("layout", LAYOUTS)
def test_a_1x1_kernel_is_linear_over_the_pixels(
    layout: Callable[..., torch.Tensor], recipe: Recipe
) -> None:
    for i, (x_shape, w_shape, options) in enumerate(POINTWISE):
        dtype = WIDE[i % 3]
        x, w, bias = operands_of(x_shape, w_shape, dtype)
        x = leaf(layout(x.detach()))
        y = conv2d(x, w, bias, recipe=recipe, **options)
        g = normal(tuple(y.shape), dtype, seed=3)
        got = [y, *gradients(y, (x, w, bias), layout(g))]

        stride = options.get("stride", 1)
        step_h, step_w = stride if isinstance(stride, tuple) else (stride, stride)
        pixels = leaf(x.detach()[..., ::step_h, ::step_w].movedim(-3, -1).contiguous())
        rows, b = leaf(w.detach().flatten(1)), leaf(bias.detach())
        want = linear(pixels, rows, b, recipe=recipe)
        assert torch.equal(y, want.movedim(-1, -3))
        assert_memory_format(y, F.conv2d(x, w, **options))
        of_x, of_w, of_b = gradients(want, (pixels, rows, b), g.movedim(-3, -1).contiguous())
        spread = torch.zeros_like(x.detach())
        spread[..., ::step_h, ::step_w] = of_x.movedim(-1, -3)
        for mine, theirs in zip(got[1:], (spread, of_w.view(w.shape), of_b), strict=True):
            # The same FP32 sums in another order.
            assert_close(mine, theirs, 1e-4 + 2 * torch.finfo(dtype).eps * theirs.abs())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("recipe", LOW)
def test_16_bits_are_torch_s_own(recipe: str) -> None:
    """Bit for bit the convolution of torch with 16-bit operands, the bias' gradient aside; of those
    that torch multiplies slowly on this CPU, that of FP32 copies of them."""
    low = Recipe.parse(recipe).x.dtype
    inside = torch.float32 if low == torch.float16 or SLOW else low
    for x_shape, w_shape, options in (*SHAPES, *POINTWISE):
        for layout in LAYOUTS:
            x, w, bias = operands_of(x_shape, w_shape)
            x = leaf(layout(x.detach()))
            y = conv2d(x, w, bias, recipe=recipe, **options)
            g = normal(tuple(y.shape), torch.float32, seed=3)
            got = gradients(y, (x, w, bias), g)
            theirs = [leaf(t.detach().to(low).to(inside)) for t in (x, w)]
            theirs.append(leaf(bias.detach().to(inside)))
            want = F.conv2d(*theirs, **options)
            assert torch.equal(y, want.float())
            assert y.stride() == want.stride()
            of_x, of_w, of_bias = gradients(want, tuple(theirs), g.to(low).to(inside))
            assert_close(got[0], of_x.float(), 0.0)
            assert_close(got[1], of_w.float(), 0.0)
            # Theirs is the sum of the rounded g, rounded.
            limit = 2.0**-7 * g.reshape(-1, *g.shape[-3:]).abs().sum((0, 2, 3))
            assert_close(got[2], of_bias.float(), limit)
