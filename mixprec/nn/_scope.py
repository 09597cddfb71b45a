"""The modules around layers, where attention and shared casts are in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from .._modes import Block, nor_below, not_compiled
from .._originals import functional
from ..functional._attention import fits, mask_fits, run_attention
from ..functional._derivatives import is_plain, may_run_as_one
from ..functional._one_pass import rotary
from ..functional.operands import saved_tensors_hooks, share_casts
from ..ops._dispatch import autocast, checks
from ..recipes import Recipe
from ._content import content_of, undecorated
from ._layer import Layer
from ._replaced import Fused
from .autocast import (
    RegionAware,
    current_region,
    is_for_onnx,
    recipe_here,
    traceable,
    without_modes,
)

_SDPA = functional.scaled_dot_product_attention


class AttentionMode(RegionAware):
    """Runs torch's scaled_dot_product_attention as `mixprec.functional.attention`, with operands
    in the 16-bit dtype of the recipe, where there is no dropout, and no mask but on a CPU.

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
            recipe = recipe_here(self.recipe, self.region)
            operands = None if recipe is None else attention_operands(*args, **kwargs)
        if recipe is None or operands is None:
            return traceable(func)(*args, **kwargs)
        return attend(recipe.dtype, _in_order(), *operands)


@nor_below
def _in_order() -> bool | None:
    """Whether a block asks for rows that do not depend on others: None where none does."""
    stack = _get_current_function_mode_stack()
    return any(isinstance(mode, Block) and mode.in_order for mode in stack) or None


@nor_below
def attend(
    low: torch.dtype,
    in_order: bool | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`run_attention` of what `attention_operands` returns."""
    device = query.device.type
    with without_modes():
        if autocast.is_on(device):
            query, key, value = (autocast.cast_operand(x, device) for x in (query, key, value))
            low = query.dtype
        return run_attention(query, key, value, is_causal, scale, low, mask, in_order)


@nor_below
def _surroundings() -> tuple[bool, object]:
    if torch.compiler.is_compiling():
        return True, None  # the compiler's own are none of the program's
    return torch.is_grad_enabled(), saved_tensors_hooks()


@nor_below
def attention_operands(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """query, key, value, is_causal, scale and mask of a call that `functional.attention` computes;
    None for any other, which is torch's, with its errors."""
    try:
        query, key, value, mask, dropout, is_causal, scale, enable_gqa = _bind(*args, **kwargs)
    except TypeError:
        return None
    if dropout != 0.0 or not may_run_as_one(query, key, value):
        return None
    # The program may have chosen kernels of torch, as with sdpa_kernel. (Compiled code cannot ask.)
    if not torch.compiler.is_compiling() and not torch.backends.cuda.flash_sdp_enabled():
        return None
    if len({_read_as(x) for x in (query, key, value)}) > 1 or not fits(query, key, value):
        return None
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return None
    if mask is not None and not (
        query.is_cpu and not is_causal and is_plain(mask) and mask_fits(mask, query, key)
    ):
        return None
    return query, key, value, is_causal, scale, mask


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


class FusionScope(Fused):
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
            return self.original(*args, **kwargs)


# The content of f(q, k, cos, sin, unsqueeze_dim=1), which returns x * cos + cat(-x2, x1) * sin of
# both q and k [B, H, T, D], x1 and x2 being the halves of x: of 119 modules of transformers 5.24.
_ROTARY = "f33b83a4172790f6"
# That of wrappers of forward passes that only rename an argument, from `old_name`.
RENAMES = "f9f84e3c40a9c33d"


def calls_known_functions(kind: Any) -> bool:
    raw, _ = _undecorated(kind.forward)
    return raw is not None and bool(_found(raw))


class RotaryForward(FusionScope):
    """A module around layers whose forward pass rotates queries and keys by such a function."""

    def original(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self.module)
        if torch.compiler.is_compiling():  # which makes one loop of them
            return super().original(*args, **kwargs)
        raw, renamed = _undecorated(kind.forward)
        functions = {} if raw is None else _found(raw)
        if raw is None or not functions or renamed & kwargs.keys():
            return super().original(*args, **kwargs)
        scope = {**raw.__globals__, **{name: _in_one_pass(f) for name, f in functions.items()}}
        same = FunctionType(raw.__code__, scope, raw.__name__, raw.__defaults__, raw.__closure__)
        same.__kwdefaults__ = raw.__kwdefaults__
        return same(self.module, *args, **kwargs)


def _undecorated(forward: Any) -> tuple[FunctionType | None, set[str]]:
    """The function itself, and the names of arguments that its decorators rename; None under a
    decorator that may do anything."""
    function, variables = undecorated(forward, {RENAMES})
    known = isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
    return (function if known else None), {each["old_name"] for each in variables}


def _found(raw: FunctionType) -> dict[str, FunctionType]:
    """The known functions that it calls, by name."""
    used = {name: raw.__globals__.get(name) for name in raw.__code__.co_names}
    functions = {name: f for name, f in used.items() if isinstance(f, FunctionType)}
    return {name: f for name, f in functions.items() if content_of(f).digest == _ROTARY}


def _in_one_pass(function: FunctionType) -> Callable[..., Any]:
    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _fits(*args):
            q, k, cos, sin = args
            with without_modes():
                # To the dtype that x * cos has.
                return tuple(rotary(x.to(cos.dtype), cos, sin) for x in (q, k))
        return function(*args, **kwargs)

    return rotate


def _fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether `rotary` computes the same."""
    if not may_run_as_one(q, k, cos, sin):
        return False
    b, _, t, d = q.shape if q.dim() == k.dim() == 4 else (0, 0, 0, 1)
    return (
        d % 2 == 0
        and (k.shape[0], *k.shape[2:]) == (b, t, d)
        and cos.shape == sin.shape
        and cos.shape in ((1, t, d), (b, t, d))
        and q.dtype in checks.FLOATS
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and q.device == k.device == cos.device == sin.device
        and not (cos.requires_grad or sin.requires_grad)
        and current_region() is None
        and not is_for_onnx()
    )
