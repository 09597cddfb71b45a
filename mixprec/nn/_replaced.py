"""A function in place of a method of one module: `convert(fuse=True)` and `convert(saved=)`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..memory.compress_saved import Bits, compress_saved
from .known import known_by_content

FEED_FORWARD = "feed_forward_chunk"  # of encoders of transformers
_FRAMES = 6  # between a module's forward pass and its method, with wrappers


class Replaced:
    """What runs in place of the method of a module, whose attribute of that name calls it.

    Not a class derived from the module's, whose identity and name other code reads; not a pair of
    hooks, which torch does not call for KeyboardInterrupt; and not a closure, which would go on
    calling the module that a deepcopy was made of.
    """

    method = "forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def attribute(self) -> MethodType:
        """A method, because torch.compile compares the code of that. An object it compares by
        identity: blocks of one kind would each be compiled."""

        def attribute(own: Any, *args: Any, **kwargs: Any) -> Any:
            # accelerate makes it, or this function alone, a method of the module.
            return (own if isinstance(own, Replaced) else self)(*args, **kwargs)

        # For trainers that look up the arguments of a model, and transformers, which counts them.
        original = getattr(type(self.module), self.method)
        attribute.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return MethodType(attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:
            args = args[1:]
        if not torch.compiler.is_compiling() and (other := self._other_caller()) is not None:
            return getattr(type(other), self.method)(other, *args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the module's class."""
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    def _other_caller(self) -> nn.Module | None:
        """The module that calls this, if it is another one: a shallow copy, a replica of
        DataParallel, or what a method of the user's own has copied attributes to."""
        frame: Any = sys._getframe(2)
        for _ in range(_FRAMES):
            caller = frame.f_locals.get("self") if frame is not None else None
            if isinstance(caller, nn.Module) and replaced_of(caller, self.method) is self:
                return caller if caller is not self.module else None
            frame = frame and frame.f_back
        return None


def replaced_of(module: nn.Module, method: str = "forward") -> Replaced | None:
    attribute = vars(module).get(method)  # of earlier versions: the object itself
    replaced = (
        attribute if isinstance(attribute, Replaced) else getattr(attribute, "__self__", None)
    )
    return replaced if isinstance(replaced, Replaced) else None


def replace(replaced: Replaced) -> None:
    vars(replaced.module)[replaced.method] = replaced.attribute


class Fused(Replaced):
    """A method whose modules run as one function where that computes the same."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        names = [*inspect.signature(getattr(type(module), self.method)).parameters][1:]
        self.argument = names[0] if len(names) == 1 else ""

    def only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of a call as forward(x) or forward(name=x); None for another call."""
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs[self.argument] if not args and [*kwargs] == [self.argument] else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": known_by_content({type(m) for m in self.module.modules()})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known_by_content(state.pop("known", ()))  # before the model is compiled
        vars(self).update(state)


class Wrapped(Replaced):
    """A forward pass inside of a block, also that of a shallow copy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.replaced = vars(module).get("forward")

    def _other_caller(self) -> nn.Module | None:
        return None

    @property
    def forward(self) -> Callable[..., Any]:
        """What it wraps."""
        return self.original if self.replaced is None else self.replaced


class Compressed(Wrapped):
    """A forward pass inside compress_saved."""

    def __init__(self, module: nn.Module, bits: Bits) -> None:
        super().__init__(module)
        self.bits = bits

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        with compress_saved(self.bits, model=self.module):
            return self.forward(*args, **kwargs)


def fused_forward_of(module: nn.Module) -> Fused | None:
    replaced = replaced_of(module)
    return replaced if isinstance(replaced, Fused) else None


def has_other_forward(module: nn.Module) -> bool:
    """Whether the module has a forward pass that is neither its class's nor a fused one."""
    return "forward" in vars(module) and fused_forward_of(module) is None


def unfuse(model: nn.Module) -> None:
    """Give all modules the methods of their class."""
    for module in model.modules():
        for name in ("forward", FEED_FORWARD):
            if isinstance(replaced_of(module, name), Fused):
                del vars(module)[name]


def unwrap(model: nn.Module) -> None:
    """Give the model the forward pass inside of its blocks."""
    while isinstance(wrapped := replaced_of(model), Wrapped):
        del model.forward
        if wrapped.replaced is not None:
            model.forward = wrapped.replaced
