"""The module whose compiled code runs: modules of the same kind share what Dynamo has compiled."""

from __future__ import annotations

import sys
from types import CodeType, FrameType, MethodType
from typing import Any

from torch import nn


class Root:
    """Of a frame that Dynamo traces: the first module, or method of one, among its arguments and
    the variables around it, as torch.compile calls modules of torch's own.

    Modules of a graph are those that it was traced with; where another root runs the same code, its
    modules with the same names are meant.
    """

    def __init__(self, frame: Any) -> None:
        self._key = key(frame.f_code)
        root = _argument(frame)
        modules = [] if root is None else root.named_modules()
        self._names = {id(module): name for name, module in modules}  # of two, the last

    def now(self) -> nn.Module | None:
        """Of the compiled code that has called this."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and key(frame.f_code) != self._key:
            frame = frame.f_back
        return None if frame is None else _argument(frame)

    def module(self, traced: int, now: nn.Module | None) -> int:
        """The id of the module in the place of the one that was traced."""
        name = self._names.get(traced)
        if name is None or now is None:
            return traced
        for part in name.split(".") if name else ():
            found = now._modules.get(part)
            if found is None:
                return traced
            now = found
        return id(now)


def _argument(frame: Any) -> nn.Module | None:
    code: CodeType = frame.f_code
    names = (*code.co_varnames[: code.co_argcount], *code.co_freevars)
    values = (frame.f_locals.get(name) for name in names)
    found = (value.__self__ if isinstance(value, MethodType) else value for value in values)
    return next((value for value in found if isinstance(value, nn.Module)), None)


def key(code: CodeType) -> tuple[str, int, str]:
    """The same for what torch.compile makes of it."""
    return code.co_filename, code.co_firstlineno, code.co_name
