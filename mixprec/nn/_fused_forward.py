"""A forward pass in place of a module's own, as `convert(fuse=True)` gives it."""

from __future__ import annotations

import inspect
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn

from .._originals import CALLERS
from .known import known_by_content


class FusedForward:
    """The `forward` of one module, as an attribute of it, like that of `convert(saved=)`.

    Not a class derived from the module's, whose identity and name other code reads.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        names = [*inspect.signature(type(module).forward).parameters][1:]
        self.argument = names[0] if len(names) == 1 else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # bound as a method, as accelerate does
            args = args[1:]
        if not torch.compiler.is_compiling() and (other := self._other_caller()) is not None:
            return type(other).forward(other, *args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _other_caller(self) -> nn.Module | None:
        """The module that calls this, if it is another one: a shallow copy, a replica of
        DataParallel, or what a method of the user's own has copied attributes to."""
        frame = sys._getframe(2)
        caller = frame.f_locals.get("self") if frame.f_code in CALLERS else None
        return caller if isinstance(caller, nn.Module) and caller is not self.module else None

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of a call as forward(x) or forward(name=x); None for another call."""
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs[self.argument] if not args and [*kwargs] == [self.argument] else None

    @property
    def __code__(self) -> CodeType:
        """For torch.export, which looks up names of arguments."""
        code: CodeType = type(self.module).forward.__code__
        return code

    @property
    def __signature__(self) -> inspect.Signature:
        """For trainers that look up the arguments of a model."""
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": known_by_content({type(m) for m in self.module.modules()})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known_by_content(state.pop("known", ()))  # before the model is compiled
        vars(self).update(state)


def fused_forward_of(module: nn.Module) -> FusedForward | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, FusedForward) else None


def own_forward(module: nn.Module) -> bool:
    """Whether the module has a forward pass that is neither its class's nor a fused one."""
    return "forward" in vars(module) and fused_forward_of(module) is None
