"""The layers with a recipe: their settings, and the same product in FP32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ... import _said
from ...functional._convolution import every, is_pointwise
from ...functional.operands import Delayed
from ...nn import Conv1D
from ...nn.autocast import recipe_here
from ...recipes import Recipe


def recipe_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of `model` that casts its operands by a recipe, once, with its path."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "recipe", None), Recipe):
            yield name, module


def measured_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those whose output is one product of input and weight: not the input projections of
    attention, stacked experts, and layers with a forward pass of their own."""
    for name, module in recipe_layers(model):
        if getattr(module, "_one_product", True):
            yield name, module


def say_what_is_left_out(who: str, model: nn.Module) -> None:
    """Name the layers with a recipe that are not measured."""
    measured = {name for name, _ in measured_layers(model)}
    left = [name for name, _ in recipe_layers(model) if name not in measured]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        _said.say(
            f"{who}: not measured, because they are not one product of input and weight: "
            f"{', '.join(left[:3])}{more}"
        )


def state_here(layer: nn.Module) -> tuple[Recipe, Delayed | None] | None:
    """The recipe that `layer` computes with in this region of the program, and the state of delayed
    scaling if it has one; None where `mixprec.autocast` switched recipes off."""
    own: Recipe = layer.recipe  # type: ignore[assignment]
    recipe = recipe_here(own)
    if recipe is None:
        return None
    if not recipe.is_delayed or recipe != own:
        return recipe, None
    return recipe, Delayed(*(getattr(layer, name) for name in ("scale", "amax", "grad_amax")))


def as_operand(layer: nn.Module, role: str, t: torch.Tensor) -> torch.Tensor:
    """t ("x", "w" or "g" of `layer`) in the shape of its cast, which determines rows and blocks.

    A convolution with FP8 operands is a GEMM over pixels if it combines only channels; otherwise
    its operands are cast as [first dimension, all the rest]. (The zeros of padding are excluded.)
    """
    if isinstance(layer, Conv1D):
        return t.t() if role == "w" else t
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return t
    if role == "w":
        return t.flatten(1)
    t = t.unsqueeze(0) if t.dim() == layer.weight.dim() - 1 else t
    pointwise = is_pointwise(layer.kernel_size, layer.padding, layer.groups)
    if layer.transposed or not pointwise:
        return t.flatten(1)
    if role == "x":
        t = every(t, layer.stride)
    return t.movedim(1, -1)


def product_fp32(
    layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The output of torch's own module in FP32; None for an unknown kind of layer."""
    x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if isinstance(layer, (nn.Linear, Conv1D)):
        return nn.functional.linear(x, as_operand(layer, "w", weight), bias)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return None  # whose padding depends on a size that its call may name
    if isinstance(layer, nn.modules.conv._ConvNd):
        y: torch.Tensor = layer._conv_forward(x, weight, bias)  # applies any padding_mode
        return y
    return None
