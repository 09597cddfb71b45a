"""convert(fuse=True): find the parts of a model that can run as one function, and make them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._local_gradients import is_sharded
from ..functional._attention import run_attention
from ..functional._derivatives import is_twice_differentiable
from ..functional._norm import norm
from ..functional._unbind import unbind
from ..ops._dispatch import checks
from ..recipes import RECIPES
from . import _region
from ._fused import Part, act_of, why_separate
from ._layer import Layer
from ._norms import Swapped, forward_of, norm_of
from ._shared_input import SharedInput, children_that_share
from ._subclass import swap

__all__ = ["Found", "FusedAttention", "FusedMLP", "FusedNorm", "FusedSequential", "fuse", "unfuse"]

# Forward passes as `forward_of` writes them, and the children that take part: those before the
# activation, the activation, the last one, and what follows.
_MLPS = {
    # Llama, Mistral, Qwen and others
    "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": (
        ("gate_proj", "up_proj"), "act_fn", "down_proj", None
    ),
    # GPT-2
    "x = self.c_fc(x)\nx = self.act(x)\nx = self.c_proj(x)\nreturn self.dropout(x)": (
        ("c_fc",), "act", "c_proj", "dropout"
    ),
}  # fmt: skip
_UNBIND = {torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__}  # q, k, v = qkv
_SDPA = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}


class FusedSequential(Swapped):
    """nn.Sequential, with parts of its modules that run as one function."""

    parts: dict[int, tuple[nn.Module, ...]] = {}  # noqa: RUF012 - by position; replaced, not changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules = tuple(self._modules.values())
        i = 0
        while i < len(modules):
            part = self.parts.get(i, ())
            together = modules[i : i + len(part)]
            # Another module may have taken a place since.
            if part and len(together) == len(part) and all(map(_same, together, part)):
                (x,) = _part_of(part)(x)
                i += len(part)
            else:
                x = modules[i](x)  # type: ignore[misc]
                i += 1
        return x


class FusedMLP(Swapped):
    """The MLP of a transformer, whose layers and activation run as one function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, after = _mlp(self)
        (y,) = part(x)
        return y if after is None else self._modules[after](y)  # type: ignore[misc]


class FusedNorm(Swapped):
    """An RMSNorm in one pass. Where its output goes is not known, so that it is cast apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = norm_of(self)
        if parts is None or not _one_pass(x) or any(map(is_sharded, self.parameters())):
            return self.alone(x)
        eps, subtract_mean, weight, bias, promotes = parts
        dtype = x.dtype
        if promotes and weight is not None:
            dtype = torch.promote_types(dtype, weight.dtype)
        with _region.without_modes():
            return norm(x, weight, bias, eps, subtract_mean, dtype)


class FusedAttention(SharedInput):
    """A module in whose forward pass scaled_dot_product_attention is `functional.attention`, where
    there is neither a mask nor dropout; its operands have the 16-bit dtype of the recipe."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = next((m for m in self.modules() if isinstance(m, Layer)), None)
        recipe = None if layer is None else _region.recipe_here(layer.recipe)
        if recipe is None:
            return self.alone(*args, **kwargs)
        with _Attention(torch.bfloat16 if recipe.is_scaled else recipe.x.dtype):
            return super().forward(*args, **kwargs)


class _Attention(TorchFunctionMode):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func in _UNBIND and not torch.compiler.is_compiling():
            outputs = unbind(*args, **kwargs)
            return outputs if func is not torch.Tensor.__iter__ else iter(outputs)
        return func(*args, **kwargs)

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
        with _region.without_modes():
            return run_attention(query, key, value, is_causal, scale, self.low)


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
    taken: set[nn.Module] = set()  # by a Sequential
    for fqn, module in list(model.named_modules()):
        if "forward" in vars(module) or isinstance(module, Swapped):
            continue
        if type(module).forward is nn.Sequential.forward:
            _fuse_sequential(module, fqn, found)
            if isinstance(module, FusedSequential):
                taken |= {child for part in module.parts.values() for child in part}
        elif forward_of(type(module)) in _MLPS:
            _fuse_mlp(module, fqn, found)
        elif module not in taken and (of_norm := norm_of(module)) and not of_norm.subtract_mean:
            swap(FusedNorm, module)
            found.fused[fqn] = "norm"
        if not isinstance(module, Swapped):
            _fuse_calls(module, fqn, found)
    return found


def unfuse(model: nn.Module) -> None:
    """Give all modules the class that `fuse` found them with."""
    for module in model.modules():
        if isinstance(module, Swapped):
            for name in ("parts", "shared"):
                vars(module).pop(name, None)
            module.__class__ = type(module).__bases__[1]


def _one_pass(x: torch.Tensor) -> bool:
    """Whether a norm of x is to run as one function here. It has no recipe of its own: with any,
    the region tells whether layers cast."""
    on = _region.recipe_here(RECIPES["bf16"]) is not None and not is_twice_differentiable()
    return on and x.dim() > 0 and x.dtype in checks.FLOATS


def _same(a: object, b: object) -> bool:
    return a is b


def _part_of(modules: tuple[Any, ...]) -> Part:
    """[norm], linear, [activation, linear]."""
    norm, rest = (None, modules) if isinstance(modules[0], Layer) else (modules[0], modules[1:])
    act, last = rest[1:] if len(rest) == 3 else (None, None)
    return Part([rest[0]], norm=norm, act=act, last=last)


def _mlp(module: nn.Module) -> tuple[Part, str | None]:
    """The part that an MLP is, of the modules that it has now, and the name of what follows."""
    first, act, last, after = _MLPS[forward_of(type(module))]
    kids: dict[str, Any] = module._modules
    return Part([kids[name] for name in first], act=kids[act], last=kids[last]), after


def _fuse_mlp(module: nn.Module, fqn: str, found: Found) -> None:
    part, _ = _mlp(module)
    why = why_separate(part.layers, None, part.act)
    if why is not None:
        found.left[fqn] = why
        return
    swap(FusedMLP, module)
    gated = "activation * linear" if len(part.first) == 2 else "activation"
    found.fused[fqn] = f"linear, {gated}, linear"


def _fuse_calls(module: nn.Module, fqn: str, found: Found) -> None:
    """Attention, and layers that take one tensor."""
    forward = inspect.unwrap(type(module).forward)
    layers = {name for name, child in module._modules.items() if isinstance(child, Layer)}
    does, shared = [], []
    if _SDPA & {*forward.__code__.co_names}:
        if any(isinstance(m, Layer) for m in module.modules()):
            does.append("attention")
        else:
            found.left[fqn] = "layers without a recipe around the attention"
    for called in children_that_share(forward) if len(layers) > 1 else ():
        names = tuple(name for name in called if name in layers)
        if len(names) < 2:
            continue
        if why := why_separate([module.get_submodule(name) for name in names]):
            found.left[f"{fqn}.{names[0]}".lstrip(".")] = why
        else:
            shared.append(names)
            does.append(f"one cast for {', '.join(names)}")
    if does:
        swap(FusedAttention if does[0] == "attention" else SharedInput, module)
        found.fused[fqn] = " + ".join(does)
    if shared:
        module.shared = tuple(shared)  # type: ignore[assignment]


def _fuse_sequential(module: nn.Module, fqn: str, found: Found) -> None:
    """norm, linear; norm, linear, activation, linear; linear, activation, linear."""
    children: list[Any] = list(module._modules.values())
    parts: dict[int, tuple[nn.Module, ...]] = {}
    told, i = [], 0
    while i < len(children):
        start = i
        i += norm_of(children[i]) is not None
        if i == len(children) or not isinstance(children[i], Layer):
            i = start + 1
            continue
        acts = i + 2 < len(children) and act_of(children[i + 1]) is not None
        i += 3 if acts and isinstance(children[i + 2], Layer) else 1
        if i - start == 1:
            continue  # a linear layer alone
        modules = tuple(children[start:i])
        part = _part_of(modules)
        why = why_separate(part.layers, part.norm, part.act)
        if why is not None:
            found.left[f"{fqn}.{start}".lstrip(".")] = why
            continue
        parts[start] = modules
        of_norm = "" if part.norm is None else "norm, "
        told.append(of_norm + "linear" + ("" if part.act is None else ", activation, linear"))
    if parts:
        swap(FusedSequential, module)
        module.parts = parts  # type: ignore[assignment]
        found.fused[fqn or "the model"] = " + ".join(told)
