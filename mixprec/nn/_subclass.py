"""Classes with the forward pass of one class, and everything else of the user's own."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from .known import load_tables

_known: dict[tuple[type, type], Any] = {}


class Swapped(nn.Module):
    """A module whose class `convert(fuse=True)` has replaced by one derived from it."""

    _argument = ""  # the name of the only argument of its own forward pass, if it has one

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class."""
        return super().forward(*args, **kwargs)

    def only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of a call as forward(x) or forward(name=x); None for another call."""
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs[self._argument] if not args and [*kwargs] == [self._argument] else None


def new_instance(layer: Any, module: nn.Module) -> Any:
    """An empty instance of `layer`, or of a subclass of it and of the class of `module`."""
    original = type(module)
    if parametrize.is_parametrized(module):
        (original,) = original.__bases__  # torch has made a subclass for this one module
    kind = layer if issubclass(layer, original) else _subclass(layer, original)
    return kind.__new__(kind)


def original_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class, of torch or the user, that a layer of mixprec.nn stands for; None if it is of a
    class derived from those that `convert` makes."""
    kind: Any = type(layer)
    if parametrize.is_parametrized(layer):
        (kind,) = kind.__bases__
    kind = _class_before_swap(kind)
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
        content: dict[str, Any] = {"__module__": "mixprec.nn", "__reduce_ex__": _reduce}
        name = layer.__name__
        if issubclass(layer, Swapped):
            # Libraries look up what a model can do by the name of its class, module and all.
            name = original.__name__
            for attribute in ("__module__", "__qualname__", "__doc__"):
                content[attribute] = getattr(original, attribute)
            content |= _forward_like(layer, original)
        _known[pair] = type(name, pair, content)
    return _known[pair]


def _forward_like(layer: Any, original: Any) -> dict[str, Any]:
    """The forward pass of `layer` with the signature of that of `original`, which trainers read."""
    own = layer.forward
    forward = types.FunctionType(
        own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__doc__ = original.forward.__doc__
    try:
        signature = inspect.signature(original.forward)
    except (TypeError, ValueError):  # of compiled code
        return {"forward": forward}
    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = [*signature.parameters][1:]
    return {"forward": forward, "_argument": names[0] if len(names) == 1 else ""}


def _new(spec: Any) -> Any:
    load_tables()  # in a process that has not called convert
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


def _class_before_swap(kind: Any) -> Any:
    """The class that `swap` found; `kind` itself if there was no swap."""
    swapped = issubclass(kind, Swapped) and _known.get(kind.__bases__) is kind
    return kind.__bases__[1] if swapped else kind


def class_before_fusing(module: nn.Module) -> Any:
    return _class_before_swap(type(module))


def swap(kind: type, module: nn.Module) -> None:
    """Give `module` a class with the forward pass of `kind` and everything else of its own.

    TypeError where Python or the class does not allow that."""
    module.__class__ = _subclass(kind, type(module))


def undo_swap(module: nn.Module) -> None:
    module.__class__ = class_before_fusing(module)
