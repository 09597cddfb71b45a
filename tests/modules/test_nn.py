"""mixprec.nn.Linear and convolutions: torch's modules in everything but the arithmetic."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import WIDE, for_each, normal, pairwise
from independent import assert_same_lists
from layer_cases import unused_scales
from torch import nn

import mixprec
from mixprec import functional, scaling
from mixprec.nn import Conv2d, ConvTranspose2d, Linear
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import BUFFERS, plain_state_dict, update_scales
from mixprec.testing import sqnr

# What makes a layer, ours or torch's; the shape of an input; and torch's and our function.
Make = Callable[..., nn.Module]
Kind = tuple[Make, Make, tuple[int, ...], Callable, Callable]


def kind_of_conv(kernel: int) -> Kind:
    makes = (partial(conv, 4, 6, kernel, 2) for conv in (Conv2d, nn.Conv2d))
    return *makes, (2, 4, 9, 7), *(partial(f, stride=2) for f in (F.conv2d, functional.conv2d))


def upsampling() -> Kind:
    makes = (partial(conv, 4, 6, 3, 2) for conv in (ConvTranspose2d, nn.ConvTranspose2d))
    function = partial(functional.convolution, stride=2, transposed=True)
    return *makes, (2, 4, 9, 7), partial(F.conv_transpose2d, stride=2), function


LINEARS = partial(Linear, 16, 8), partial(nn.Linear, 16, 8)
KINDS: dict[str, Kind] = {
    "linear": (*LINEARS, (2, 3, 16), F.linear, functional.linear),
    "1x1": kind_of_conv(1),
    "3x3": kind_of_conv(3),
    "transposed": upsampling(),
}


@for_each("kind, recipe, dtype", pairwise(list(KINDS), list(RECIPES), WIDE))
def test_computes_the_function(kind: str, recipe: str, dtype: torch.dtype) -> None:
    make, plain, shape, _, function = KINDS[kind]
    layer = make(dtype=dtype, recipe=recipe)
    assert isinstance(layer, type(plain()))
    for x_dtype in WIDE:
        x = normal(shape, x_dtype)
        y = layer(x)
        state = unused_scales() if layer.recipe.is_delayed else None
        want = function(x, layer.weight, layer.bias, recipe=recipe, delayed=state)
        assert y.dtype == x_dtype
        assert torch.equal(y, want)
    layer(x).sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


@for_each("kind", KINDS)
def test_under_autocast_the_output_has_the_autocast_dtype(kind: str) -> None:
    make, _, shape, *_ = KINDS[kind]
    layer, x = make(), normal(shape, torch.float32).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            y = layer(x)
            assert torch.equal(compiled(x), y)
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == torch.float32
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


@for_each("kind", KINDS)
def test_state_dict_and_initialisation_are_those_of_torch(kind: str) -> None:
    make, make_plain, *_ = KINDS[kind]
    torch.manual_seed(1)
    plain = make_plain()
    torch.manual_seed(1)
    ours = make()
    assert torch.equal(ours.weight, plain.weight)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    delayed = ["weight", "bias", *BUFFERS]
    assert list(make(recipe="fp8-delayed").state_dict()) == delayed


@for_each("kind, recipe", pairwise(list(KINDS), ["bf16", "fp8-delayed"]))
def test_copies_and_pickles(kind: str, recipe: str) -> None:
    """They compute the same, with scales of their own that their optimizer's step updates."""
    make, _, shape, *_ = KINDS[kind]
    layer = make(recipe=recipe, name="stem")
    x = normal(shape, torch.float32)
    layer(x).sum().backward()
    update_scales(layer)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert (other.recipe, other.name) == (layer.recipe, "stem")
        y = other(50 * x)
        with torch.no_grad():  # where no amax is recorded
            assert torch.equal(y, layer(50 * x))
        y.sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        if recipe == "fp8-delayed":
            assert other.amax_history[0, 0] == 50 * x.abs().max()
    assert type(layer).__module__ == "mixprec.nn"


@for_each("kind", KINDS)
def test_a_module_of_torch_becomes_a_layer(kind: str) -> None:
    """The module itself, also where its caller drops what convert returns."""
    make, make_plain, shape, *_ = KINDS[kind]
    plain = make_plain().eval()
    plain.bias.requires_grad_(False)
    plain.tag = "mine"
    weight, bias, elsewhere = plain.weight, plain.bias, [plain]
    calls: list[str] = []
    handle = plain.register_forward_hook(lambda *_: calls.append("forward"))
    layer = mixprec.convert(plain, "fp16")
    assert layer is plain is elsewhere[0]
    assert type(layer) is type(make())
    assert layer.weight is weight
    assert layer.bias is bias
    assert not layer.training
    assert (layer.tag, layer.recipe) == ("mine", Recipe.parse("fp16"))
    if kind != "linear":
        assert layer.stride == (2, 2)
    layer(torch.zeros(shape))
    handle.remove()
    layer(torch.zeros(shape))
    assert calls == ["forward"]

    compiled = make_plain()
    compiled.compile()
    with pytest.raises(ValueError, match="_compiled_call_impl"):
        mixprec.convert(compiled, "fp8")
    assert type(compiled) is type(make_plain())


@for_each("kind", KINDS)
def test_inside_a_region_with_another_recipe(kind: str) -> None:
    make, _, shape, torchs, function = KINDS[kind]
    layer, x = make(recipe="fp8-delayed"), normal(shape, torch.float32)
    with mixprec.autocast("bf16"):
        y = layer(x)
    want = function(x, layer.weight, layer.bias, recipe="bf16")
    assert torch.equal(y, want)
    with mixprec.autocast(enabled=False):
        assert torch.equal(layer(x), torchs(x, layer.weight, layer.bias))
    assert layer.amax == -1.0, "its own scales have not been used"
    with mixprec.autocast():
        layer(x)
    assert layer.amax > 0
    with mixprec.reuse_weights(layer), mixprec.autocast("bf16"):
        assert torch.equal(layer(x), want)


@for_each("kind, recipe", pairwise(list(KINDS), list(RECIPES)))
def test_the_output_may_be_written_to(kind: str, recipe: str) -> None:
    make, _, shape, *_ = KINDS[kind]
    x = normal(shape, torch.float32)
    inputs = [x, x[0], x[0, 0] if kind == "linear" else x.to(memory_format=torch.channels_last)]
    for x in inputs:
        results = []
        for inplace in (False, True):
            torch.manual_seed(0)
            layer = make(recipe=recipe)
            y = F.relu(layer(x), inplace=inplace)
            y.sum().backward()
            results.append([y.detach(), layer.weight.grad])
        assert_same_lists(*results)


def test_fp16_without_a_scaler_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(scaling, "_warned", False)

    def step(recipe: str, scaler: mixprec.GradScaler) -> None:
        layer = Linear(4, 4, recipe=recipe)
        optimizer = mixprec.optim.AdamW(layer.parameters())
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)

    step("bf16", mixprec.GradScaler(enabled=False))
    step("fp16", mixprec.GradScaler())
    assert not recwarn.list
    with pytest.warns(UserWarning, match="fp16 recipe is being trained without loss scaling"):
        step("fp16", mixprec.GradScaler(enabled=False))
    step("fp16", mixprec.GradScaler(enabled=False))
    assert not recwarn.list


# --- convolutions alone ------------------------------------------------------------------------

MODES, PADDINGS = ["zeros", "reflect", "replicate", "circular"], [2, (1, 2), "same", "valid"]


@for_each("mode, padding, recipe", pairwise(MODES, PADDINGS, ["fp8", "fp8-delayed", "fp16"]))
def test_padding_as_torch_does(recipe: str, padding: int | str, mode: str) -> None:
    for kernel in (1, 3):
        ours = Conv2d(4, 6, kernel, 1, padding, padding_mode=mode, recipe=recipe)
        theirs = nn.Conv2d(4, 6, kernel, 1, padding, padding_mode=mode)
        theirs.load_state_dict(plain_state_dict(ours))
        for x in (normal((2, 4, 6, 5), torch.float32), normal((4, 6, 5), torch.float32)):
            with mixprec.reuse_weights(ours):
                y = ours(x)
            assert torch.equal(y, ours(x))
            assert y.shape == theirs(x).shape
            assert sqnr(theirs(x), y) > 18
    if mode in ("zeros", "reflect"):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
            ours([1.0])


# Recipe(clip_activations=True): fp16 outputs that would overflow saturate, and are counted


CLIP = replace(RECIPES["fp16"], name="fp16-clip", clip_activations=True)
MAX = 65504.0
HALF = torch.float16


def clipping(kind: str, recipe: object = CLIP) -> nn.Module:
    """y = x0 + x1, of the middle pixel where there are any."""
    options = {"bias": False, "recipe": recipe}
    layer = Linear(2, 1, **options) if kind == "linear" else Conv2d(2, 1, int(kind[0]), **options)
    torch.nn.init.ones_(layer.weight)
    return layer


def shaped(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """rows [M, 2] as the input of a layer: samples, with zeros around each pixel."""
    if kind == "linear":
        return rows
    return nn.functional.pad(rows[:, :, None, None], (int(kind[0]) // 2,) * 4)


def middle(t: torch.Tensor) -> list[list[float]]:
    """Of the pixels around, or of the kernel's positions, the one in the middle."""
    return (t if t.dim() == 2 else t[:, :, t.shape[2] // 2, t.shape[3] // 2]).tolist()


PLACES = ("linear", "1x1", "3x3")
VALUES = torch.tensor(
    [
        [1.0, 2.0],
        [6e4, 6e4],  # too large
        [-6e4, -6e4],
        [65504.0, 15.0],  # rounds to 65504
        [65504.0, 16.0],  # half way to the next number there would be: rounds to Inf
        [math.inf, 1.0],
        [math.nan, 1.0],
        [math.inf, -math.inf],
    ]
)


@for_each("kind", PLACES)
def test_what_is_clipped_and_what_stays(kind: str) -> None:
    layer, x = clipping(kind), shaped(VALUES.half(), kind)
    y = layer(x).flatten()
    want = torch.tensor([3, MAX, -MAX, MAX, MAX, math.inf, math.nan, math.nan], dtype=HALF)
    assert y.dtype == HALF
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert (layer.clipped.dtype, layer.clipped.shape) == (torch.int64, ())
    assert layer.clipped == 3
    layer(x)
    assert layer.clipped == 6
    plain = clipping(kind, "fp16")
    assert plain(x).flatten()[1:3].tolist() == [math.inf, -math.inf], "without it, it shows"
    assert not hasattr(plain, "clipped")


@for_each("kind", PLACES)
def test_the_gradient_is_that_of_a_clamp(kind: str) -> None:
    layer = clipping(kind)
    x = shaped(VALUES[:3].half(), kind).requires_grad_()
    layer(x).sum().backward()
    assert middle(x.grad) == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert middle(layer.weight.grad) == [[1.0, 2.0]], "of the first row alone"


@for_each("kind", PLACES)
def test_an_output_that_is_not_fp16_cannot_clip(kind: str) -> None:
    layer, x, want = clipping(kind), shaped(VALUES[:5], kind), VALUES[:5].half().float().sum(1)
    assert torch.equal(layer(x).flatten(), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x).flatten(), want.bfloat16())
    assert layer.clipped == 0
    with torch.autocast("cpu", HALF):
        assert layer(x).flatten().tolist() == [3.0, MAX, -MAX, MAX, MAX]
    assert layer.clipped == 3


@for_each("kind", PLACES)
def test_the_counter_is_a_buffer_that_no_state_dict_has(kind: str) -> None:
    layer, x = clipping(kind), shaped(VALUES.half(), kind)
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_buffers()] == ["clipped"]
    layer(x)
    copied = copy.deepcopy(layer).to(torch.bfloat16)
    assert (copied.clipped.dtype, copied.clipped) == (torch.int64, 3)
    with torch.device("meta"):
        there = clipping(kind)
    there.to_empty(device="cpu")
    assert there.clipped == 0
    layer.recipe = "bf16"
    assert not hasattr(layer, "clipped")
    layer.recipe = CLIP
    assert layer.clipped == 0
    with mixprec.autocast("fp16"):  # another recipe's region
        layer(x)
    assert layer.clipped == 0
