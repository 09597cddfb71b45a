"""A layer that stays an instance of the user's own class, and keeps its parametrizations."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

_known: dict[tuple[type, type], Any] = {}
_SHARED = ("name", "weight", "bias", "reset_parameters")


def class_for(layer: Any, module: nn.Module) -> Any:
    """`layer`, or a subclass of it and of the class of `module`."""
    original = type(module)
    if parametrize.is_parametrized(module):
        (original,) = original.__bases__  # torch has made a subclass for this one module
    return layer if issubclass(layer, original) else _subclass(layer, original)


def names_of(layer: type) -> set[str]:
    """What `layer` adds to torch's modules, where it would replace attributes of a user's class;
    without `name`, which stays the user's, and the parameters."""
    added: set[str] = set()
    for kind in layer.__mro__:
        if kind.__module__.startswith("mixprec."):
            added.update(vars(kind))
    return {n for n in added if not n.startswith("__")} - {*dir(nn.Module), *_SHARED}


def original_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class, of torch or the user, that a layer of mixprec.nn stands for; None if it is of a
    class derived from those that `convert` makes."""
    kind: Any = type(layer)
    if parametrize.is_parametrized(layer):
        (kind,) = kind.__bases__
    bases = kind.__bases__
    return bases[1] if kind.__module__ == "mixprec.nn" and len(bases) == 2 else None


def inject_parametrizations(module: Any) -> None:
    """Give `module`, which has the registry of another one, a class like that of torch."""
    if "parametrizations" in module._modules:
        parametrize._inject_new_class(module)
        for name in module.parametrizations:
            parametrize._inject_property(module, name)


def _subclass(layer: type, original: type) -> Any:
    """The class with the forward pass of `layer`, and everything else of `original`."""
    pair = layer, original
    if pair not in _known:
        content = {"__module__": "mixprec.nn", "__reduce_ex__": _reduce}
        if hasattr(original, "name"):
            content["name"] = inspect.getattr_static(original, "name")
        _known[pair] = type(layer.__name__, pair, content)
    return _known[pair]


def _new(spec: Any) -> Any:
    kind = _class_of(spec)
    return kind.__new__(kind)


def _spec(kind: type) -> Any:
    """A class of `_subclass` as the pair that it combines, whose second may be such a class too."""
    bases: Any = kind.__bases__
    return (bases[0], _spec(bases[1])) if _known.get(bases) is kind else kind


def _class_of(spec: Any) -> Any:
    return _subclass(spec[0], _class_of(spec[1])) if isinstance(spec, tuple) else spec


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickle and copy: the class is made again from those that it combines."""
    reduced: Any = object.__reduce_ex__(self, max(2, int(protocol)))
    return (_new, (_spec(type(self)),), *reduced[2:])
