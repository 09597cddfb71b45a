"""Recipe(clip_activations=True): fp16 outputs that would overflow saturate, and are counted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import mixprec
from mixprec import functional
from mixprec.nn import Conv2d, Linear
from mixprec.recipes import RECIPES

CLIP = replace(RECIPES["fp16"], name="fp16-clip", clip_activations=True)
MAX = 65504.0
HALF = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


def linear(recipe: object = CLIP) -> nn.Module:
    return with_ones(Linear(2, 1, bias=False, recipe=recipe))


def conv(kernel: int) -> Callable[..., nn.Module]:
    """One that computes what `linear` does, of the middle pixel."""
    return lambda recipe=CLIP: with_ones(Conv2d(2, 1, kernel, bias=False, recipe=recipe))


def with_ones(layer: nn.Module) -> nn.Module:
    torch.nn.init.ones_(layer.weight)
    return layer


def shaped(rows: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """rows [M, 2] as the input of `layer`: samples, with zeros around each pixel."""
    if isinstance(layer, Linear):
        return rows
    around = layer.kernel_size[0] // 2
    return nn.functional.pad(rows[:, :, None, None], (around,) * 4)


def middle(t: torch.Tensor) -> list[list[float]]:
    """Of the pixels around, or of the kernel's positions, the one in the middle."""
    return (t if t.dim() == 2 else t[:, :, t.shape[2] // 2, t.shape[3] // 2]).tolist()


LAYERS = pytest.mark.parametrize("make", [linear, conv(1), conv(3)], ids=["linear", "1x1", "3x3"])
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


@LAYERS
def test_what_is_clipped_and_what_stays(make: Callable[..., nn.Module]) -> None:
    layer = make()
    y = layer(shaped(VALUES.half(), layer)).flatten()
    want = torch.tensor([3, MAX, -MAX, MAX, MAX, math.inf, math.nan, math.nan], dtype=HALF)
    assert y.dtype == HALF
    assert torch.equal(y.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0))
    assert torch.equal(y.isnan(), want.isnan())
    assert (layer.clipped.dtype, layer.clipped.shape) == (torch.int64, ())
    assert layer.clipped == 3
    layer(shaped(VALUES.half(), layer))
    assert layer.clipped == 6
    plain = make("fp16")
    overflowed = plain(shaped(VALUES.half(), plain)).flatten()
    assert overflowed[1:3].tolist() == [math.inf, -math.inf], "without it, an overflow shows"
    assert not hasattr(plain, "clipped")


@LAYERS
def test_the_gradient_is_that_of_a_clamp(make: Callable[..., nn.Module]) -> None:
    layer = make()
    x = shaped(VALUES[:3].half(), layer).requires_grad_()
    layer(x).sum().backward()
    assert middle(x.grad) == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert middle(layer.weight.grad) == [[1.0, 2.0]], "of the first row alone"


@LAYERS
def test_an_output_that_is_not_fp16_cannot_clip(make: Callable[..., nn.Module]) -> None:
    layer = make()
    rows = VALUES[:5]
    y = layer(shaped(rows, layer)).flatten()
    assert y.tolist() == rows.half().float().sum(1).tolist()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(shaped(rows, layer)).flatten()
    assert y.tolist() == rows.half().float().sum(1).bfloat16().tolist()
    assert layer.clipped == 0
    with torch.autocast("cpu", HALF):
        y = layer(shaped(rows, layer)).flatten()
    assert y.tolist() == [3.0, MAX, -MAX, MAX, MAX]
    assert layer.clipped == 3


def test_values_without_overflow_are_those_of_fp16() -> None:
    """For Linear, bit for bit: an FP32 sum is rounded once, as without it."""
    torch.manual_seed(0)
    x = torch.randn(5, 33, dtype=HALF)
    plain = Linear(33, 7, recipe="fp16")
    clip = Linear.from_linear(plain, CLIP)
    results = []
    for layer in (plain, clip):
        y = layer(x)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), layer.weight.grad.clone()])
        layer.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert clip.clipped == 0


def test_functional_forms_count_where_they_are_given_a_counter() -> None:
    x, w = torch.full((1, 4), 200.0, dtype=HALF), torch.full((3, 4), 200.0)
    counter = torch.zeros((), dtype=torch.int64)
    y = functional.linear(x, w, recipe=CLIP, clipped=counter)
    assert y.tolist() == [[MAX] * 3]
    assert counter == 3
    y = functional.conv2d(x[..., None, None], w[..., None, None], recipe=CLIP, clipped=counter)
    assert y.flatten().tolist() == [MAX] * 3
    assert counter == 6
    assert functional.linear(x, w, recipe=CLIP).tolist() == [[MAX] * 3]
    with pytest.raises(ValueError, match="linear: clipped must hold one int64"):
        functional.linear(x, w, recipe=CLIP, clipped=torch.zeros(()))


@LAYERS
def test_the_counter_is_a_buffer_that_no_state_dict_has(
    make: Callable[..., nn.Module],
) -> None:
    layer = make()
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_buffers()] == ["clipped"]
    layer(shaped(VALUES.half(), layer))
    copied = copy.deepcopy(layer).to(torch.bfloat16)
    assert (copied.clipped.dtype, copied.clipped) == (torch.int64, 3)
    with torch.device("meta"):
        there = make()
    there.to_empty(device="cpu")
    assert there.clipped == 0
    layer.recipe = "bf16"
    assert not hasattr(layer, "clipped")
    layer.recipe = CLIP
    assert layer.clipped == 0
    with mixprec.autocast("fp16"):  # another recipe's region
        layer(shaped(VALUES.half(), layer))
    assert layer.clipped == 0


def test_compiled_it_counts_the_same(fresh_compiler: None) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(36, 3))
        model = mixprec.convert(nn.Sequential(*layers), CLIP)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(400)
        f = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        left = []
        for i in range(2):
            y = f(1000 * torch.randn(4, 2, 3, 3, generator=torch.manual_seed(i)).half())
            y.float().mean().backward()
            left.append(y.detach())
        return [*left, *(p.grad for p in model.parameters()), *model.buffers()]

    eager, compiled = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert all(count > 0 for count in eager[-2:]), "something was clipped in both layers"
