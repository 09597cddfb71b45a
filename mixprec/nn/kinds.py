"""Which modules `mixprec.convert` replaces, by what, and why it leaves the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from . import intercepted
from ._layer import Layer
from .attention import MultiheadAttention
from .conv import Conv2d
from .conv1d import Conv1D
from .linear import Linear

__all__ = ["Coverage", "adapters", "converter", "coverage"]

# Modules whose weights are not multiplied with anything: a lookup is no matrix product.
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def converter(module: nn.Module) -> Callable[..., Layer] | None:
    """What makes a layer of mixprec.nn from `module`; None if it is left as it is.

    A subclass without a forward pass of its own computes as torch's class does.
    """
    kind: Any = type(module)
    if isinstance(module, (Layer, nn.modules.lazy.LazyModuleMixin)):
        return None
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return Linear.from_linear
    plain = kind.forward, getattr(kind, "_conv_forward", None)
    if isinstance(module, nn.Conv2d) and plain == (nn.Conv2d.forward, nn.Conv2d._conv_forward):
        return Conv2d.from_conv
    if isinstance(module, nn.MultiheadAttention) and plain[0] is nn.MultiheadAttention.forward:
        return MultiheadAttention.from_attention
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return Conv1D.from_conv1d
    layer = intercepted.layer_for(module)
    return None if layer is None else layer.from_module


def adapters(model: nn.Module) -> set[nn.Module]:
    """The small layers that peft has added (LoRA and others) beside the layers that they adapt."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if "base_layer" in module._modules:
            for name in getattr(module, "adapter_layer_names", ()):
                added = getattr(module, name, None)
                found.update(added.modules() if isinstance(added, nn.Module) else ())
    return found


def leave_fast_paths(model: nn.Module) -> None:
    """Make torch's encoder layers call their parts, of which one is converted, in eval mode too:
    their fast path reads the weights."""
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            continue
        if any(isinstance(part, Layer) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
            else:
                module.activation_relu_or_gelu = 0


class Coverage(NamedTuple):
    """The share of a model's weights that is in layers with a recipe.

    Weights are the parameters of two or more dimensions, each once; those of embeddings only count
    where a layer shares them. left: how many weights compute as before, by the kind of module and
    the reason. unsupported: how many of these `convert` has no layer for.
    """

    converted: int
    total: int
    left: Counter[tuple[str, str]]
    unsupported: int

    def __str__(self) -> str:
        share = self.converted / self.total if self.total else 1.0
        left = ", ".join(
            f"{kind} {count / self.total:.1%} ({reason})"
            for (kind, reason), count in self.left.most_common()
        )
        return f"{share:.0%} of the weights" + (f"; left out: {left}" if left else "")


def coverage(model: nn.Module, excluded: Collection[nn.Module] = ()) -> Coverage:
    """How much of `model` computes in low precision, and what does not. excluded: layers that the
    caller has asked to leave out."""
    added = adapters(model)
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    converted = {p for layer in layers for p in _weights(layer, recurse=True)}
    left: Counter[tuple[str, str]] = Counter()
    unsupported, seen = 0, set(converted)
    for module in model.modules():
        for weight in _weights(module):
            if weight not in seen and not isinstance(module, _LOOKUPS):
                seen.add(weight)
                reason = _why_left(module, added, excluded)
                left[type(module).__name__, reason] += weight.numel()
                unsupported += weight.numel() if reason in _UNSUPPORTED else 0
    total = sum(p.numel() for p in converted)
    return Coverage(total, total + sum(left.values()), left, unsupported)


def _weights(module: nn.Module, recurse: bool = False) -> Iterator[torch.Tensor]:
    """Recursively for a layer, whose weight torch.nn.utils.parametrize may keep in a child."""
    for p in module.parameters(recurse):
        if not isinstance(p, nn.parameter.UninitializedParameter) and p.dim() >= 2:
            yield p


def _why_left(
    module: nn.Module, added: Collection[nn.Module], excluded: Collection[nn.Module]
) -> str:
    if module in added:
        return "an adapter of peft"
    if module in excluded:
        return "excluded"
    own = isinstance(module, (nn.Linear, nn.Conv2d))
    return _UNSUPPORTED[0] if own else _UNSUPPORTED[1]


_UNSUPPORTED = ("its forward pass calls no product by name", "there is no such layer in mixprec.nn")
