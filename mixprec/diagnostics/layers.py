"""The layers that cast operands by a recipe, and the three products of one as matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _said
from ..functional._convolution import every, is_pointwise
from ..functional._products import ROLES
from ..functional.operands import Delayed
from ..nn import Conv1D
from ..nn.autocast import recipe_here
from ..nn.conv import Convolution
from ..nn.kinds import layer_for
from ..nn.linear import Linear
from ..recipes import Recipe
from .measure import product
from .writers import joined


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


def say_what_is_left_out(model: nn.Module) -> None:
    """Name the layers with a recipe that a Monitor does not measure."""
    measured = {name for name, _ in measured_layers(model)}
    left = [name for name, _ in recipe_layers(model) if name not in measured]
    if left:
        why = "not measured, because they are not one product of input and weight"
        _said.say(f"Monitor: {why}: {joined(left, 3)}")


def state_here(layer: nn.Module) -> tuple[Recipe, Delayed | None] | None:
    """The recipe that `layer` computes with in this region of the program, and the state of delayed
    scaling if it has one; None where `mixprec.autocast` switched recipes off."""
    set_recipe: Recipe = layer.recipe  # type: ignore[assignment]
    recipe = recipe_here(set_recipe)
    if recipe is None:
        return None
    if not recipe.is_delayed or recipe != set_recipe:
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


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input of a layer's forward pass."""
    return args[0] if args else next(iter(kwargs.values()))


@contextmanager
def after_forward(
    layers: Mapping[str, nn.Module], hook: Callable[[str, nn.Module, torch.Tensor, Any], Any]
) -> Iterator[None]:
    """Call hook(name, layer, x, y) after each forward pass of a layer in the block; what it returns
    is in place of y, unless it is None."""

    def named(name: str) -> Callable[..., Any]:
        return lambda layer, args, kwargs, y: hook(name, layer, first(args, kwargs), y)

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(named(name), with_kwargs=True).remove)
        yield


def why_not_matrices(module: nn.Module) -> str | None:
    """Why the products of a layer that `convert` takes are none of `Matrices`; None: they are."""
    kind = _kind(module)
    if issubclass(kind, (Linear, Conv1D)):
        return None
    if not issubclass(kind, Convolution):
        return "its products are not one of an input and its weight"
    pointwise = is_pointwise(module.kernel_size, module.padding, module.groups)  # type: ignore[arg-type]
    return None if pointwise and not module.transposed else "a convolution that is not 1 x 1"


def _kind(module: nn.Module) -> type[nn.Module]:
    """The layer of mixprec that a module is, or becomes."""
    if isinstance(module, (Linear, Conv1D, Convolution)):
        return type(module)
    return layer_for(module) or type(module)


@dataclass
class Matrices:
    """x [M, K], w [N, K] and g [M, N] of a call of a layer, in FP32."""

    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor

    @staticmethod
    def of_layer(layer: nn.Module, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Matrices:
        if issubclass(_kind(layer), Conv1D) and not isinstance(layer, Conv1D):
            w = w.t()  # of transformers, [K, N]
        parts = zip("xwg", (x, w, g), strict=True)
        wide = (as_operand(layer, role, t.detach()).float() for role, t in parts)
        return Matrices(*(t.reshape(-1, t.shape[-1]) for t in wide))

    @staticmethod
    def shaped(y: torch.Tensor, like: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """An output [M, N] in the shape of the layer's."""
        if not isinstance(layer, nn.modules.conv._ConvNd):
            return y.view(like.shape)
        n, *points = like.shape[1 - layer.weight.dim() :]
        return y.view(-1, *points, n).movedim(-1, 1).reshape(like.shape)

    @property
    def flops(self) -> int:
        """Of each of the three products."""
        return 2 * self.x.shape[0] * self.x.shape[1] * self.w.shape[0]

    def product(self, name: str, recipe: Recipe | None) -> torch.Tensor:
        """y [M, N], grad_input [M, K] or grad_weight [N, K]; None: in FP32."""
        a, b_t = {  # as rows along which is summed
            "forward": (self.x, self.w),
            "grad_input": (self.g, self.w.t()),
            "grad_weight": (self.g.t(), self.x.t()),
        }[name]
        return a @ b_t.t() if recipe is None else product(recipe, ROLES[name], a, b_t)
