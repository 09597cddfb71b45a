"""convert(fuse=True): find the parts of a model that can run as one function, and make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..functional._attention import attention
from ..recipes import Recipe
from . import _region
from ._fused import Part, act_of, why_separate
from ._layer import Layer
from ._norms import Swapped, names_in_forward, norm_of
from ._subclass import swap

__all__ = [
    "AbsorbedNorm",
    "Found",
    "FusedAttention",
    "FusedMLP",
    "FusedSequential",
    "Outputs",
    "SharedLinear",
    "fuse",
    "unfuse",
]

# What the forward pass of a class names, in this order, decides which of these it is.
_LLAMA_MLP = ("down_proj", "act_fn", "gate_proj", "up_proj")
_GPT2_MLP = ("c_fc", "act", "c_proj", "dropout")
_LLAMA_BLOCK = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_SDPA = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}


class AbsorbedNorm(Swapped):
    """A norm that returns its input while the layers behind it apply it, as part of their casts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x if self.part.together() else self.alone(x)
        return y


class FusedSequential(Swapped):
    """nn.Sequential with parts: (part, the number of modules that it stands for) by position."""

    parts: dict[int, tuple[Part, int]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules = list(self._modules.values())
        i = 0
        while i < len(modules):
            part, count = self.parts.get(i, (None, 1))
            x = modules[i](x) if part is None else part(x)[0]  # type: ignore[misc]
            i += count
        return x


class FusedMLP(Swapped):
    """A module that is one part, and a dropout behind it where there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.part(x)
        dropout = self._modules.get("dropout")
        return y if dropout is None else dropout(y)


class SharedLinear(Swapped):
    """One of several layers of a part, whose outputs are computed when the first is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.part.together():
            y: torch.Tensor = self.alone(x)
            return y
        outputs: Outputs = vars(self.part).setdefault("outputs", Outputs())
        return outputs.take(self.part, self, x)


class Outputs:
    """The outputs of a part that have been computed for x and not been taken yet."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.waiting: dict[int, torch.Tensor] = {}

    def take(self, part: Part, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        index = next(i for i, own in enumerate(part.first) if own is layer)
        if self.x is not x or index not in self.waiting:
            self.x, self.waiting = x, dict(enumerate(part(x)))
        y = self.waiting.pop(index)
        if not self.waiting:
            self.x = None
        return y

    def __deepcopy__(self, memo: Any) -> Outputs:
        return Outputs()

    def __reduce__(self) -> Any:
        return Outputs, ()


class FusedAttention(Swapped):
    """A module in whose forward pass scaled_dot_product_attention is `functional.attention`, where
    there is neither a mask nor dropout; its operands have the 16-bit dtype of the recipe."""

    recipe_of_layers: Recipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = _region.recipe_here(self.recipe_of_layers)
        if recipe is None:
            return self.alone(*args, **kwargs)
        with _Attention(torch.bfloat16 if recipe.is_fp8 else recipe.x.dtype):
            return self.alone(*args, **kwargs)


class _Attention(TorchFunctionMode):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attention(func, *args, **kwargs)

    def _attention(
        self,
        func: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p or query.dim() != 4:
            return func(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        q, k, v = (t.to(self.low) for t in (query, key, value))
        return attention(q, k, v, causal=is_causal, scale=scale).to(query.dtype)


class Found(NamedTuple):
    """fused: what each fused module does, by path; left: why a candidate was not fused."""

    fused: dict[str, str]
    left: dict[str, str]

    def __str__(self) -> str:
        fused = "; ".join(f"{what} ({n})" for what, n in Counter(self.fused.values()).items())
        left = "; ".join(
            f"{next(fqn for fqn, other in self.left.items() if other == why)}"
            f"{f' and {n - 1} more' if n > 1 else ''}, because of {why}"
            for why, n in Counter(self.left.values()).items()
        )
        return f"fused {fused or 'nothing'}" + (f"; not fused: {left}" if left else "")


def fuse(model: nn.Module) -> Found:
    """Fuse what is known in `model`, whose layers have been converted, in place."""
    found = Found({}, {})
    for fqn, module in list(model.named_modules()):
        if isinstance(module, Swapped):
            continue
        names = names_in_forward(module)
        if type(module).forward is nn.Sequential.forward:
            _fuse_sequential(module, fqn, found)
        elif names == _LLAMA_MLP:
            m: Any = module
            part = _part(f"{fqn}", found, [m.gate_proj, m.up_proj], act=m.act_fn, last=m.down_proj)
            _make_whole(module, fqn, part, "linear, activation * linear, linear", found)
        elif names == _GPT2_MLP:
            m = module
            part = _part(f"{fqn}", found, [m.c_fc], act=m.act, last=m.c_proj)
            _make_whole(module, fqn, part, "linear, activation, linear", found)
        if _SDPA & {*names}:
            _fuse_attention(module, fqn, found)
    for fqn, module in list(model.named_modules()):
        for name, first, owner in _norms_before(module):
            _absorb(f"{fqn}.{name}".lstrip("."), module._modules[name], first, owner, found)
    return found


def unfuse(model: nn.Module) -> None:
    """Give all modules the class that `fuse` found them with."""
    for module in model.modules():
        while isinstance(module, Swapped):
            for name in ("part", "parts", "recipe_of_layers"):
                vars(module).pop(name, None)
            module.__class__ = type(module).__bases__[1]


def _part(
    fqn: str,
    found: Found,
    first: list[Any],
    *,
    norm: nn.Module | None = None,
    act: nn.Module | None = None,
    last: Any = None,
) -> Part | None:
    """The part, or None, with the reason in `found`."""
    layers = first if last is None else [*first, last]
    if not all(isinstance(layer, Layer) for layer in layers):
        why: str | None = "a layer without a recipe"
    elif act is not None and act_of(act) is None:
        why = f"the activation {type(act).__name__}"
    elif norm is not None and norm_of(norm) is None:
        why = f"the norm {type(norm).__name__}"
    else:
        why = why_separate(layers, norm)
    if why is not None:
        found.left[fqn] = why
        return None
    return Part(first, norm=norm, act=act, last=last)


def _make_whole(module: nn.Module, fqn: str, part: Part | None, what: str, found: Found) -> None:
    if part is not None:
        swap(FusedMLP, module)
        module.part = part  # type: ignore[assignment]
        found.fused[fqn] = what


def _fuse_sequential(module: nn.Module, fqn: str, found: Found) -> None:
    """norm, linear; norm, linear, activation, linear; linear, activation, linear."""
    children: list[Any] = list(module._modules.values())
    parts: dict[int, tuple[Part, int]] = {}
    told, i = [], 0
    while i < len(children):
        start = i
        norm = children[i] if norm_of(children[i]) else None
        i += norm is not None
        first = children[i] if i < len(children) and isinstance(children[i], Layer) else None
        if first is None:
            i = start + 1
            continue
        two = (
            i + 2 < len(children) and act_of(children[i + 1]) and isinstance(children[i + 2], Layer)
        )
        act, last = (children[i + 1], children[i + 2]) if two else (None, None)
        i += 3 if two else 1
        if norm is None and last is None:
            continue
        part = _part(f"{fqn}.{start}".lstrip("."), found, [first], norm=norm, act=act, last=last)
        if part is not None:
            parts[start] = part, i - start
            told.append(
                ("norm, " if norm else "") + "linear" + (", activation, linear" if last else "")
            )
    if parts:
        swap(FusedSequential, module)
        module.parts = parts  # type: ignore[assignment]
        found.fused[fqn or "the model"] = " + ".join(told)


def _fuse_attention(module: nn.Module, fqn: str, found: Found) -> None:
    layers = [m for m in module.modules() if isinstance(m, Layer)]
    if not layers:
        found.left[fqn] = "attention without layers that have a recipe"
        return
    swap(FusedAttention, module)
    module.recipe_of_layers = layers[0].recipe  # type: ignore[assignment]
    found.fused[fqn] = "attention"


def _norms_before(module: nn.Module) -> Iterator[tuple[str, list[Any], nn.Module | None]]:
    """The norms of a block whose only reader is known: the layers that read it, or the module that
    is one part with it."""
    kids: dict[str, Any] = module._modules
    names = names_in_forward(module)
    if names == _LLAMA_BLOCK:
        inside = kids["self_attn"]._modules
        yield "input_layernorm", [inside.get(f"{n}_proj") for n in "qkv"], None
        yield "post_attention_layernorm", [], kids["mlp"]
    elif {"ln_1", "attn", "ln_2", "mlp"} <= {*names} and "crossattention" not in kids:
        yield "ln_1", [kids["attn"]._modules.get("c_attn")], None
        yield "ln_2", [], kids["mlp"]


def _absorb(fqn: str, norm: Any, first: list[Any], owner: nn.Module | None, found: Found) -> None:
    """Let the layers behind `norm` apply it."""
    if owner is None:
        part, what = _part(fqn, found, first, norm=norm), f"norm, {len(first)} linear"
    elif isinstance(owner, FusedMLP):
        alone = owner.part
        part = _part(fqn, found, alone.first, norm=norm, act=alone.act, last=alone.last)
        what = "norm before such a part"
    else:
        return
    if part is None:
        return
    if owner is None:
        for layer in first:
            swap(SharedLinear, layer)
            layer.part = part
    else:
        owner.part = part
    swap(AbsorbedNorm, norm)
    norm.part = part
    found.fused[fqn] = what
