"""Which modules `mixprec.convert` makes layers of mixprec.nn, and why it leaves the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from . import experts
from ._content import adapted_layer, imported_class
from ._layer import Layer
from .attention import MultiheadAttention
from .conv import CONVOLUTIONS, Convolution
from .linear import Conv1D, Linear

ADAPTER = "an adapter of peft"
# The share of unsupported weights above which it is worth a warning.
MOST_UNSUPPORTED = 0.05
# The attribute of torch's encoders in which leave_fast_paths keeps the value that it changes.
_KEPT = "_mixprec_fast_path"
# Classes that compute y = x @ weight^T + bias by other functions of torch.
_LINEARS = (("transformers.models.falcon.modeling_falcon", "FalconLinear"),)
# Modules whose weights are not multiplied with anything: a lookup is no matrix product.
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def layer_for(module: nn.Module) -> type[Layer] | None:
    """The layer of mixprec.nn that `module` can become; None if it is left as it is.

    A subclass without a forward pass of its own computes as torch's class does.
    """
    kind: Any = type(module)
    if isinstance(module, (Layer, nn.modules.lazy.LazyModuleMixin)) or _in_4bit(module):
        return None
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return None
    if isinstance(module, nn.Linear) and computes_linear(kind):
        return Linear
    for torchs, layer in CONVOLUTIONS.items():
        if isinstance(module, torchs) and _convolves_as(kind, torchs):
            return layer
    if isinstance(module, nn.MultiheadAttention) and kind.forward is nn.MultiheadAttention.forward:
        return MultiheadAttention
    conv1d = kind is imported_class("transformers.pytorch_utils", "Conv1D")
    return Conv1D if conv1d else experts.layer_for(module)


def computes_linear(kind: Any) -> bool:
    """Whether a class derived from nn.Linear has its forward pass, or one known to be equal."""
    equal = (imported_class(*place) for place in _LINEARS)
    forwards = [nn.Linear.forward, Linear.forward, *(k.forward for k in equal if k is not None)]
    return any(kind.forward is forward for forward in forwards)


def _convolves_as(kind: Any, torchs: Any) -> bool:
    """Whether both have the same methods for a forward pass."""
    names = ("forward", "_conv_forward", "_output_padding")
    return all(getattr(kind, name, None) is getattr(torchs, name, None) for name in names)


def _in_4bit(module: object) -> bool:
    """Whether it is a layer of bitsandbytes, whose weight is codes, of whatever dtype."""
    kind = imported_class("bitsandbytes.nn.modules", "Linear4bit")
    return kind is not None and isinstance(module, kind)


def takes_outliers(module: nn.Module) -> bool:
    """Whether the layer that `module` is, or can become, may have a recipe with outliers."""
    kind = type(module) if isinstance(module, Layer) else layer_for(module)
    return kind is not None and kind._takes_outliers


def adapters(model: nn.Module, *, of_4bit: bool = True) -> set[nn.Module]:
    """The small layers that peft has added (LoRA and others) beside the layers that they adapt;
    without of_4bit not those of bitsandbytes' layers in 4 bits."""
    modules: set[nn.Module] = set()
    adapted = adapted_layer()
    for module in model.modules() if adapted is not None else ():
        if isinstance(module, adapted):
            if not of_4bit and _in_4bit(getattr(module, "base_layer", None)):
                continue
            for name in module.adapter_layer_names:
                added = getattr(module, name, None)
                modules.update(added.modules() if isinstance(added, nn.Module) else ())
    return modules


def leave_fast_paths(model: nn.Module) -> None:
    """Make torch's encoder layers call their parts, of which one is converted or frozen, in eval
    mode too: their fast path reads the weights."""
    for module, switch, off in _fast_paths(model):
        if _has_changed(module):
            vars(module).setdefault(_KEPT, getattr(module, switch))
            setattr(module, switch, off)


def restore_fast_paths(model: nn.Module) -> None:
    """Undo leave_fast_paths, where no part is converted any more."""
    for module, switch, _ in _fast_paths(model):
        if _KEPT in vars(module) and not _has_changed(module):
            setattr(module, switch, vars(module).pop(_KEPT))


def _has_changed(module: nn.Module) -> bool:
    """Whether a part of it is converted or frozen."""
    return any(getattr(part, "_reads_no_weight", False) for part in module.modules())


def _fast_paths(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """torch's encoders and their layers, the attribute that allows the fast path, and its off."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            yield module, "use_nested_tensor", False
        elif isinstance(module, nn.TransformerEncoderLayer):
            yield module, "activation_relu_or_gelu", 0


class Coverage(NamedTuple):
    """The share of a model's weights that `convert` or `freeze` has reached.

    Weights are the parameters of two or more dimensions, each once; those of embeddings only count
    where a layer shares them. left: how many weights are as before, by the kind of module and the
    reason; names: of the modules that have them. unsupported: how many there is no layer for.
    heads: the weights of embeddings, by name, that could be those of a head: large ones, of whose
    shape no layer has a weight.
    """

    converted: int
    total: int
    left: Counter[tuple[str, str]]
    names: dict[tuple[str, str], list[str]]
    unsupported: int
    heads: dict[str, int]

    def __str__(self) -> str:
        share = self.converted / self.total if self.total else 1.0
        left = ", ".join(
            f"{kind} {count / self.total:.1%} ({_first(self.names[kind, reason])}: {reason})"
            for (kind, reason), count in self.left.most_common()
        )
        text = f"{share:.0%} of the weights" + (f"; left out: {left}" if left else "")
        if not self.heads:
            return text
        most = sum(self.heads.values())
        return (
            f"{text}; not counted: {_first([*self.heads])}: if F.linear or @ use it as a head, "
            f"that stays as it is, with up to {most / (self.total + most):.0%} of the FLOPs "
            "(mixprec.audit)"
        )

    @property
    def is_low(self) -> bool:
        """Whether much of the model is of kinds that are not supported."""
        return self.unsupported > MOST_UNSUPPORTED * self.total


def coverage(
    model: nn.Module,
    why_left: dict[nn.Module, str] | None = None,
    layers: Collection[nn.Module] | None = None,
    unsupported: str = "there is no such layer in mixprec.nn",
) -> Coverage:
    """How much of `model` is in `layers` (those of mixprec.nn), and what is not. why_left: the
    reasons for modules that could be; unsupported: the reason for all others."""
    reasons = dict.fromkeys(adapters(model), ADAPTER) | (why_left or {})
    if layers is None:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
    converted = {p for layer in layers for p in _weights(layer, recurse=True)}
    left: Counter[tuple[str, str]] = Counter()
    names: dict[tuple[str, str], list[str]] = {}
    beyond, seen = 0, set(converted)
    for fqn, module in model.named_modules():
        for weight in _weights(module):
            if weight not in seen and not isinstance(module, _LOOKUPS):
                seen.add(weight)
                reason = reasons.get(module)
                if reason is None:
                    beyond += weight.numel()
                    has_own = _has_own_forward(module)
                    reason = "it has a forward pass of its own" if has_own else unsupported
                key = type(module).__name__, reason
                left[key] += weight.numel()
                if (name := fqn or "the model") not in names.setdefault(key, []):
                    names[key].append(name)
    reached = sum(p.numel() for p in converted)
    total = reached + sum(left.values())
    shapes = {w.shape for m in model.modules() if not isinstance(m, _LOOKUPS) for w in _weights(m)}
    heads = {
        name: weight.numel()
        for name, module in model.named_modules()
        for weight in _weights(module)
        if isinstance(module, _LOOKUPS)
        and weight.shape not in shapes
        and weight.numel() > MOST_UNSUPPORTED * total
    }
    return Coverage(reached, total, left, names, beyond, heads)


def _first(names: list[str]) -> str:
    """The first two, and how many more."""
    others = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + others


def _has_own_forward(module: nn.Module) -> bool:
    """A subclass of torch's layers that computes in another way."""
    kind: Any = type(module)
    if isinstance(module, nn.Linear):
        return not computes_linear(kind)
    torchs = next((torchs for torchs in CONVOLUTIONS if isinstance(module, torchs)), None)
    return torchs is not None and not (issubclass(kind, Convolution) or _convolves_as(kind, torchs))


def _weights(module: nn.Module, recurse: bool = False) -> Iterator[torch.Tensor]:
    """Recursively for a layer, whose weight torch.nn.utils.parametrize may keep in a child."""
    for p in module.parameters(recurse):
        if not isinstance(p, nn.parameter.UninitializedParameter) and p.dim() >= 2:
            yield p
