"""The module whose compiled code runs: modules of the same kind share what Dynamo has compiled."""

from __future__ import annotations

import sys
from types import CodeType, FrameType, MethodType
from typing import Any

from torch import nn


class Root:
    """Of a frame that Dynamo traces: the modules, and modules of methods, among its arguments and
    the variables around it, as torch.compile calls modules of torch's own.

    Modules of a graph are those that it was traced with; where others run the same code, theirs
    with the same names are meant.
    """

    def __init__(self, frame: Any) -> None:
        self._key = key(frame.f_code)
        self._names: dict[int, tuple[int, str]] = {}  # the place of a root, the name in it
        for place, root in enumerate(_arguments(frame)):
            for name, module in root.named_modules():
                self._names.setdefault(id(module), (place, name))

    def now(self) -> list[nn.Module]:
        """Those of the compiled code that has called this."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and key(frame.f_code) != self._key:
            frame = frame.f_back
        return [] if frame is None else _arguments(frame)

    def module(self, traced: int, now: list[nn.Module]) -> int:
        """The id of the module in the place of the one that was traced."""
        place, name = self._names.get(traced, (len(now), ""))
        if place >= len(now):
            return traced
        module = now[place]
        for part in name.split(".") if name else ():
            found = module._modules.get(part)
            if found is None:
                return traced
            module = found
        return id(module)


def _arguments(frame: Any) -> list[nn.Module]:
    code: CodeType = frame.f_code
    names = (*code.co_varnames[: code.co_argcount], *code.co_freevars)
    values = (frame.f_locals.get(name) for name in names)
    found = (value.__self__ if isinstance(value, MethodType) else value for value in values)
    return [value for value in found if isinstance(value, nn.Module)]


def key(code: CodeType) -> tuple[str, int, str]:
    """The same for what torch.compile makes of it."""
    return code.co_filename, code.co_firstlineno, code.co_name
