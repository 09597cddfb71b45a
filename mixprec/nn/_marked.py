"""The modules around layers, where attention and shared casts are in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from .._modes import is_watched, nor_below, not_compiled
from .._originals import functional
from ..functional._attention import fits, run_attention
from ..functional._derivatives import is_twice_differentiable
from ..functional.operands import saved_tensors_hooks, share_casts
from ..ops._dispatch import autocast
from ..recipes import Recipe
from . import _region
from ._fused import PLAIN
from ._fused_forward import FusedForward
from ._layer import Layer

_SDPA = functional.scaled_dot_product_attention


class AttentionMode(_region.SeesRegions):
    """Runs torch's scaled_dot_product_attention as `mixprec.functional.attention`, with operands
    in the 16-bit dtype of the recipe, where there is neither a mask nor dropout.

    Not where grad mode or hooks on saved tensors have changed since the mode began: a part of a
    forward pass that torch.utils.checkpoint runs again would not find the mode then.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.around = _surroundings()

    @staticmethod
    @nor_below
    def serves(recipe: Recipe) -> bool:
        """Whether a mode that has begun is right for layers of `recipe` that run now."""
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, AttentionMode):
                return mode.recipe == recipe and mode.is_unchanged()
        return False

    @nor_below
    def is_unchanged(self) -> bool:
        # No checkpoint but those that it traces itself is around code that torch.compile traces.
        return torch.compiler.is_compiling() or self.around == _surroundings()

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = recipe = None
        if func is _SDPA and self.is_unchanged():
            recipe = _region.recipe_here(self.recipe, self.region)
            operands = None if recipe is None else _operands(*args, **kwargs)
        if recipe is None or operands is None:
            return _region.traceable(func)(*args, **kwargs)
        return _run(recipe.dtype, *operands)


@nor_below
def _run(
    low: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    device = query.device.type
    with _region.without_modes():
        if autocast.is_on(device):
            query, key, value = (autocast.cast_operand(x, device) for x in (query, key, value))
            low = query.dtype
        return run_attention(query, key, value, is_causal, scale, low)


@nor_below
def _surroundings() -> tuple[bool, object]:
    if torch.compiler.is_compiling():
        return True, None  # the compiler's own are none of the program's
    return torch.is_grad_enabled(), saved_tensors_hooks()


@nor_below
def _operands(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """query, key, value, is_causal and scale of a call that `functional.attention` computes; None
    for any other, which is torch's, with its errors."""
    try:
        query, key, value, mask, dropout, is_causal, scale, enable_gqa = _bind(*args, **kwargs)
    except TypeError:
        return None
    if mask is not None or dropout != 0.0 or is_twice_differentiable() or is_watched():
        return None
    if not torch.compiler.is_compiling():  # where the rest cannot be asked
        # The program may have chosen kernels of torch, as with sdpa_kernel.
        flash = torch.backends.cuda.flash_sdp_enabled()
        if not flash or torch._C._are_functorch_transforms_active():
            return None
    if any(type(x) not in PLAIN or x.is_nested for x in (query, key, value)):
        return None
    if len({_read_as(x) for x in (query, key, value)}) > 1 or not fits(query, key, value):
        return None
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return None
    return query, key, value, is_causal, scale


def _read_as(x: torch.Tensor) -> torch.dtype:
    """The dtype to which torch.autocast, if it is on, casts this operand."""
    device = x.device.type
    return autocast.operand_dtype(x, device) if autocast.is_on(device) else x.dtype


def _bind(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward pass


def layers_in(module: nn.Module) -> Iterator[Layer]:
    return (m for m in module.modules() if isinstance(m, Layer))


def own_layers(module: nn.Module) -> Iterator[Layer]:
    """The layers that the forward pass of `module` itself calls, also those in its lists."""
    for child in module._modules.values():
        if isinstance(child, Layer):
            yield child
        elif child is not None and type(child) in CONTAINERS:
            yield from own_layers(child)


class Marked(FusedForward):
    """A module around layers: attention in its forward pass is `functional.attention`, and layers
    that are its children cast a tensor that several of them take once."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        layers = [*own_layers(self.module)]
        layer = layers[0] if layers else next(layers_in(self.module), None)
        with ExitStack() as stack:
            if layer is not None and not AttentionMode.serves(layer.recipe):
                stack.enter_context(AttentionMode(layer.recipe))
            if len(layers) > 1 and not torch.compiler.is_compiling():
                stack.enter_context(share_casts())
            return self.unfused(*args, **kwargs)
