"""Recipe(clip_activations=True): fp16 outputs that would overflow saturate, and are counted."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from cases import for_each
from independent import assert_same_lists
from torch import nn

import mixprec
from mixprec import functional
from mixprec.nn import Conv2d, Linear
from mixprec.recipes import RECIPES

CLIP = replace(RECIPES["fp16"], name="fp16-clip", clip_activations=True)
MAX = 65504.0
HALF = torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


def make(kind: str, recipe: object = CLIP) -> nn.Module:
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


KINDS = ("linear", "1x1", "3x3")
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


@for_each("kind", KINDS)
def test_what_is_clipped_and_what_stays(kind: str) -> None:
    layer, x = make(kind), shaped(VALUES.half(), kind)
    y = layer(x).flatten()
    want = torch.tensor([3, MAX, -MAX, MAX, MAX, math.inf, math.nan, math.nan], dtype=HALF)
    assert y.dtype == HALF
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert (layer.clipped.dtype, layer.clipped.shape) == (torch.int64, ())
    assert layer.clipped == 3
    layer(x)
    assert layer.clipped == 6
    plain = make(kind, "fp16")
    assert plain(x).flatten()[1:3].tolist() == [math.inf, -math.inf], "without it, it shows"
    assert not hasattr(plain, "clipped")


@for_each("kind", KINDS)
def test_the_gradient_is_that_of_a_clamp(kind: str) -> None:
    layer = make(kind)
    x = shaped(VALUES[:3].half(), kind).requires_grad_()
    layer(x).sum().backward()
    assert middle(x.grad) == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert middle(layer.weight.grad) == [[1.0, 2.0]], "of the first row alone"


@for_each("kind", KINDS)
def test_an_output_that_is_not_fp16_cannot_clip(kind: str) -> None:
    layer, x, want = make(kind), shaped(VALUES[:5], kind), VALUES[:5].half().float().sum(1)
    assert torch.equal(layer(x).flatten(), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x).flatten(), want.bfloat16())
    assert layer.clipped == 0
    with torch.autocast("cpu", HALF):
        assert layer(x).flatten().tolist() == [3.0, MAX, -MAX, MAX, MAX]
    assert layer.clipped == 3


def test_linear_counts_where_it_is_given_a_counter() -> None:
    x, w = torch.full((1, 4), 200.0, dtype=HALF), torch.full((3, 4), 200.0)
    counter = torch.zeros((), dtype=torch.int64)
    y = functional.linear(x, w, recipe=CLIP, clipped=counter)
    assert y.tolist() == [[MAX] * 3]
    assert counter == 3
    assert functional.linear(x, w, recipe=CLIP).tolist() == [[MAX] * 3]


@for_each("kind", KINDS)
def test_the_counter_is_a_buffer_that_no_state_dict_has(kind: str) -> None:
    layer, x = make(kind), shaped(VALUES.half(), kind)
    assert list(layer.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_buffers()] == ["clipped"]
    layer(x)
    copied = copy.deepcopy(layer).to(torch.bfloat16)
    assert (copied.clipped.dtype, copied.clipped) == (torch.int64, 3)
    with torch.device("meta"):
        there = make(kind)
    there.to_empty(device="cpu")
    assert there.clipped == 0
    layer.recipe = "bf16"
    assert not hasattr(layer, "clipped")
    layer.recipe = CLIP
    assert layer.clipped == 0
    with mixprec.autocast("fp16"):  # another recipe's region
        layer(x)
    assert layer.clipped == 0


@for_each("kind", KINDS)
def test_compiled_it_counts_the_same(kind: str) -> None:
    layer, results = make(kind), []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.clipped.zero_()
        x = shaped(VALUES[:5].half(), kind).requires_grad_()
        y = run(x)
        grads = torch.autograd.grad(y.sum(), (x, layer.weight))
        results.append([y.detach(), *grads, layer.clipped.clone()])
    assert_same_lists(*results)
    assert results[0][-1] == 3
