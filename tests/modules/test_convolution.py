"""functional.convolution: against FP64, against torch's own in 16 bits; mixprec.nn's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import WIDE, every_second, for_each, name, nearest, normal, permuted
from layer_cases import convolution, leaf, linear, value
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import convert
from mixprec.formats import E4M3, E5M2
from mixprec.nn import Intercepted, Layer
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import assert_close, sqnr

LOW = tuple(name for name, recipe in RECIPES.items() if not recipe.is_scaled)
# But for those whose backward products round x and w at random.
SCALED = tuple(name for name, r in RECIPES.items() if r.is_scaled and not r.backward)
MIXES = (
    Recipe("e5m2", E5M2, E5M2, E5M2),
    Recipe("rows of w", E4M3, E4M3, E5M2, w_granularity="row"),
    Recipe("squares", E4M3, E4M3, E4M3, x_granularity="block128x128"),
)
UP = {"transposed": True, "stride": 2}
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
    ((2, 8, 11), (16, 8, 3), {"padding": 1}),
    ((8, 11), (6, 4, 4), {"groups": 2, "stride": 2}),
    ((2, 4, 9), (6, 4, 4), {"padding": "same"}),
    ((3, 4, 3), (6, 4, 3), {}),  # one output
    ((2, 4, 5, 6, 4), (6, 4, 3, 2, 1), {"padding": (1, 0, 0), "stride": (1, 2, 1)}),
    ((4, 3, 4, 5), (8, 1, 2, 2, 2), {"groups": 4, "padding": "same"}),
    ((2, 8, 7), (8, 6, 4), {"transposed": True, "stride": 2, "padding": 1}),
    ((2, 8, 5, 4), (8, 3, 3, 3), {**UP, "groups": 2, "output_padding": 1, "padding": 1}),
    ((2, 8, 5, 4), (8, 6, 1, 1), UP),
    ((8, 5, 1), (8, 6, 3, 2), UP),
    ((2, 4, 3, 4, 2), (4, 6, 2, 2, 2), UP),
)
POINTWISE: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((0, 8, 5, 7), (6, 8, 1, 1), {}),
    ((2, 8, 5, 7), (6, 8, 1, 1), {"padding": "same"}),
    ((2, 8, 9, 7), (6, 8, 1, 1), {"stride": (2, 3), "padding": "valid", "dilation": 2}),
    ((2, 160, 5, 7), (6, 160, 1, 1), {}),
    ((8, 5, 7), (6, 8, 1, 1), {"stride": 2}),
    ((2, 8, 1, 1), (6, 8, 1, 1), {}),
    ((2, 8, 7), (6, 8, 1), {"stride": 2}),
    ((2, 8, 3, 4, 5), (6, 8, 1, 1, 1), {}),
)


def channels_last(t: torch.Tensor) -> torch.Tensor:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return t.contiguous(memory_format=order) if order else t


LAYOUTS = (torch.Tensor.contiguous, channels_last, permuted, every_second)


def operands_of(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias, which require gradients."""
    outputs = w_shape[1] * options.get("groups", 1) if "transposed" in options else w_shape[0]
    shapes = x_shape, w_shape, (outputs,)
    x, w, bias = (leaf(normal(shape, dtype, seed=i)) for i, shape in enumerate(shapes))
    return x, w, bias


def decoded(t: torch.Tensor, role: str, recipe: Recipe) -> torch.Tensor:
    """What a tensor stands for once it is cast as a matrix [first dimension, the rest], in bf16."""
    return value(t.flatten(1), role, recipe).bfloat16().double().reshape(t.shape)


gradients = torch.autograd.grad


def torchs(x: torch.Tensor, w: torch.Tensor, *bias: Any, **options: Any) -> torch.Tensor:
    """torch.nn.functional's convolution of as many dimensions."""
    up = "_transpose" if (options := dict(options)).pop("transposed", False) else ""
    y: torch.Tensor = getattr(F, f"conv{up}{w.dim() - 2}d")(x, w, *bias, **options)
    return y


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
        x, w, bias = operands_of(x_shape, w_shape, options, dtype)
        y = convolution(leaf_x := leaf(layout(x.detach())), w, bias, recipe=recipe, **options)
        g = normal(tuple(y.shape), dtype, seed=3)
        got = [y.detach(), *gradients(y, (leaf_x, w, bias), layout(g))]
        if w.dim() == 4 and options.get("transposed") is None:  # else torch's depends on the dtype
            assert_memory_format(y, torchs(leaf_x, w, **options))
        assert [t.dtype for t in got] == [dtype] * 4

        points = w.dim() - 2
        x4, g4 = (t.detach().reshape(-1, *t.shape[-points - 1 :]) for t in (x, g))
        if options.get("padding") == "same" and w_shape[2] % 2 == 0:
            x4 = F.pad(x4, (0, 1) * points)  # changes blocks, so it comes before the cast
            options = {**options, "padding": tuple((k - 1) // 2 for k in w_shape[2:])}

        def products(*tensors: torch.Tensor, options: dict[str, Any] = options) -> list:
            qx, qw, b, qg = map(leaf, tensors)
            y = torchs(qx, qw, b, **options)
            return [y.detach(), *gradients(y, (qx, qw), qg)]

        b16 = bias.detach().to(torch.float32 if SLOW else torch.bfloat16).double()
        qx, qw, qg = (decoded(t, role, recipe) for t, role in ((x4, "x"), (w, "w"), (g4, "g")))
        exact = products(qx, qw, b16, qg)
        sizes = products(*(t.abs() for t in (qx, qw, b16, qg)))
        counts = [w[0].numel() + 1, w_shape[0] * w[0, 0].numel() + 1, g4[:, 0].numel()]
        if "transposed" in options:
            counts = [counts[1], counts[0], x4[:, 0].numel()]
        for t, e, size, count in zip(got[:3], exact, sizes, counts, strict=True):
            limit = bound(e, size, count, dtype)
            # Without the zeros that were added to x, and without the dimension of a single sample.
            inside = (..., *(slice(n) for n in t.shape[-points:]))
            e, limit = (r[inside].reshape(t.shape) for r in (e, limit))
            assert_close(t, e, limit)
        limit = (
            2 * torch.finfo(dtype).eps * g4.double().abs().transpose(0, 1).flatten(1).sum(1) + 1e-6
        )
        assert_close(got[3], g4.double().transpose(0, 1).flatten(1).sum(1), limit)


@pytest.mark.parametrize("recipe", [nearest(n) for n in SCALED], ids=name)
@for_each("layout", LAYOUTS)
def test_a_1x1_kernel_is_linear_over_the_pixels(
    layout: Callable[..., torch.Tensor], recipe: Recipe
) -> None:
    for i, (x_shape, w_shape, options) in enumerate(POINTWISE):
        dtype = WIDE[i % 3]
        x, w, bias = operands_of(x_shape, w_shape, options, dtype)
        x = leaf(layout(x.detach()))
        y = convolution(x, w, bias, recipe=recipe, **options)
        g = normal(tuple(y.shape), dtype, seed=3)
        got = [y, *gradients(y, (x, w, bias), layout(g))]

        stride = options.get("stride", 1)
        points = w.dim() - 2
        steps = stride if isinstance(stride, tuple) else (stride,) * points
        every = (..., *(slice(None, None, step) for step in steps))
        pixels = leaf(x.detach()[every].movedim(-points - 1, -1).contiguous())
        rows, b = leaf(w.detach().flatten(1)), leaf(bias.detach())
        want = linear(pixels, rows, b, recipe=recipe)
        assert torch.equal(y, want.movedim(-1, -points - 1))
        if w.dim() < 5:
            assert_memory_format(y, torchs(x, w, **options))
        else:  # torch's depends on the dtype, the sizes and the processor
            last = torch.channels_last_3d
            assert y.is_contiguous(memory_format=last) == (layout is channels_last)
        of_x, of_w, of_b = gradients(
            want, (pixels, rows, b), g.movedim(-points - 1, -1).contiguous()
        )
        spread = torch.zeros_like(x.detach())
        spread[every] = of_x.movedim(-1, -points - 1)
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
            x, w, bias = operands_of(x_shape, w_shape, options)
            x = leaf(layout(x.detach()))
            y = convolution(x, w, bias, recipe=recipe, **options)
            g = normal(tuple(y.shape), torch.float32, seed=3)
            got = gradients(y, (x, w, bias), g)
            theirs = [leaf(t.detach().to(low).to(inside)) for t in (x, w)]
            theirs.append(leaf(bias.detach().to(inside)))
            want = torchs(*theirs, **options)
            assert torch.equal(y, want.float())
            assert y.stride() == want.stride()
            of_x, of_w, of_bias = gradients(want, tuple(theirs), g.to(low).to(inside))
            assert_close(got[0], of_x.float(), 0.0)
            assert_close(got[1], of_w.float(), 0.0)
            # Theirs is the sum of the rounded g, rounded.
            parts = g.reshape(-1, *g.shape[1 - w.dim() :]).transpose(0, 1).flatten(1)
            limit = 2.0**-7 * parts.abs().sum(1)
            assert_close(got[2], of_bias.float(), limit)


PADDED: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 5, 1), (17, 5, 3), {"padding": 1}),
    ((2, 16, 3, 1), (3, 16, 1, 3), {"padding": (0, 2), "stride": 2}),
    ((2, 7, 4, 4), (9, 7, 2, 4), {"padding": 3, "dilation": (1, 3), "stride": 3}),
    ((3, 3, 1), (3, 17, 3), {"transposed": True, "padding": 1, "stride": 3}),
)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_positions_of_a_kernel_that_see_padding_alone(recipe: str) -> None:
    """Their gradients are 0. torch's in bf16 are arbitrary, or it crashes."""
    for x_shape, w_shape, options in PADDED:
        for layout in (torch.Tensor.contiguous, channels_last):
            x, w, _ = operands_of(x_shape, w_shape, options)
            x = leaf(layout(x.detach()))
            y = convolution(x, w, recipe=recipe, **options)
            g = normal(tuple(y.shape), torch.float32, seed=3)
            exact = torchs(x, w, **options)
            for _ in range(4):  # what was freed before
                torch.full((1000,), torch.nan)
            pairs = zip(gradients(y, (x, w), g), gradients(exact, (x, w), g), strict=True)
            for got, want in pairs:
                assert sqnr(want, got) > (40 if recipe == "bf16" else 20)
            assert (want == 0).any()
            assert (got[want == 0] == 0).all()


# --- layers ----------------------------------------------------------------------------------

torch.manual_seed(0)  # where weights cancel, a gradient of x is small, and its SQNR too
CONVOLUTIONS = [  # of torch, and the shape of x
    (nn.Conv1d(8, 12, 3, 2, 1), (4, 8, 33)),
    (nn.Conv1d(8, 12, 1, bias=False), (4, 8, 33)),
    (nn.Conv1d(8, 16, 16, groups=4, padding="same", padding_mode="circular"), (4, 8, 33)),
    (nn.Conv2d(8, 12, (3, 1), dilation=2), (4, 8, 9, 8)),
    (nn.Conv3d(4, 6, 2, padding=1), (4, 4, 5, 6, 7)),
    (nn.ConvTranspose1d(8, 12, 4, 2, 1), (4, 8, 33)),
    (nn.ConvTranspose2d(8, 12, 3, 2, 1, output_padding=1, groups=4), (4, 8, 9, 8)),
    (nn.ConvTranspose3d(4, 6, 2, 2, bias=False), (4, 4, 5, 6, 7)),
    (parametrizations.weight_norm(nn.Conv1d(8, 12, 3), dim=2), (4, 8, 33)),
]


@pytest.mark.parametrize(
    ("recipe", "bar"), [("bf16", 40), ("fp16", 55), ("fp8", 20), ("mxfp8", 20)]
)
def test_layers_are_near_those_of_torch(recipe: str, bar: int) -> None:
    for original, shape in CONVOLUTIONS:
        layer, x = copy.deepcopy(original), normal(shape, torch.float32)
        converted = convert(layer, recipe)
        assert converted is layer, "in place"
        assert isinstance(layer, Layer)
        assert layer.recipe.name == recipe
        found = [
            [
                y := module(leaf_x := leaf(x)),
                *gradients(y.sin().sum(), [leaf_x, *module.parameters()]),
            ]
            for module in (original, layer)
        ]
        assert all(sqnr(*pair) > bar for pair in zip(*found, strict=True)), original
        if recipe == "fp8" and not parametrize.is_parametrized(layer):
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x), layer(x))
        assert torch.equal(checkpoint(layer, leaf(x), use_reentrant=False), layer(x))
        with mixprec.reuse_weights(layer):
            assert torch.equal(layer(x), layer(x))
        assert type(mixprec.unconvert(layer)) is type(layer)
        assert torch.equal(layer(x), original(x))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_the_size_of_a_transposed_convolution_may_be_given(recipe: str) -> None:
    for make, shape, size in (
        (partial(nn.ConvTranspose1d, 4, 6, 3, 2), (2, 4, 5), [12]),
        (partial(nn.ConvTranspose2d, 4, 6, 3, 2), (2, 4, 5, 4), [2, 6, 12, 9]),
    ):
        layer, x = convert(make(), recipe), normal(shape, torch.float32)
        y = layer(x, output_size=size)
        assert [*y.shape[-len(shape) + 2 :]] == size[-len(shape) + 2 :]
        with mixprec.autocast(enabled=False):
            assert sqnr(layer(x, size), y) > 18
            assert layer(x).shape == layer(x, None).shape != y.shape


def test_backward_inside_autocast() -> None:
    layer = convert(nn.ConvTranspose1d(8, 6, 1, groups=2), "bf16")
    with torch.autocast("cpu", torch.float16):
        layer(leaf(normal((3, 8, 8), torch.float32))).float().sum().backward()
    assert layer.weight.grad.isfinite().all()


class Causal(nn.Conv1d):
    """As those of streaming speech models: zeros at the beginning, then the convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (2, 0)))


class OtherPadding(nn.ConvTranspose1d):
    def _output_padding(self, *_: Any, **__: Any) -> list[int]:
        return [1]


def test_subclasses_that_compute_in_another_way() -> None:
    x = normal((2, 4, 9), torch.float32)
    for layer in (Causal(4, 6, 3), OtherPadding(4, 6, 3, 2)):
        original, want = type(layer), layer(x)
        convert(layer, "bf16")
        assert isinstance(layer, original)
        assert isinstance(layer, Intercepted)
        assert 40 < sqnr(want, layer(x)) < 80
