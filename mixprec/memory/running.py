"""The op that this thread is running: what autograd saves meanwhile belongs to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "Op",
    "Watch",
    "current",
    "in_compiled_code",
    "is_held_by_owner",
    "keep_as_is",
    "running",
]

_BACKWARD = ("backward", "grad")


class Op(NamedTuple):
    """A function of torch or of mixprec.functional, and its arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    as_is: list[torch.Tensor]  # what it saves and nobody is to compress

    def argument(self, position: int, name: str) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    yield item


class _Thread(threading.local):
    op: Op | None = None


_thread = _Thread()


def current() -> Op | None:
    """The op that runs now; None inside an autograd.Function of another library, compiled code,
    and whatever a backward pass computes again."""
    return _thread.op


@contextmanager
def running(name: str, *args: Any) -> Iterator[None]:
    """For an autograd.Function, which torch's function modes do not see."""
    before, _thread.op = _thread.op, Op(name, args, {}, [])
    try:
        yield
    finally:
        _thread.op = before


def keep_as_is(*tensors: torch.Tensor | None) -> None:
    """Never compress these objects, which the current op will save, such as its cast weight."""
    op = None if torch.compiler.is_compiling() else _thread.op
    if op is not None:
        op.as_is.extend(t for t in tensors if t is not None)


def is_held_by_owner(t: torch.Tensor, watch: Watch) -> bool:
    """Whether t, or what it is a view of, was there before the block: a buffer or an input. It has
    no history, is an argument of the op, and no result of a function that `watch` saw."""
    base = t if t._base is None else t._base
    if base.grad_fn is not None or base in watch.made:
        return False
    op = current()
    given = () if op is None else op.tensors()
    return op is None or any(base is a or base is a._base for a in given)


def in_compiled_code() -> bool:
    """Whether torch.compile's code is what saves a tensor now: it calls its autograd.Function from
    this package of torch, a few frames up."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if "/_functorch/_aot_autograd/" in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


class Watch(TorchFunctionMode):
    """Makes each function of torch the current op while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if name == "get":  # an attribute of a tensor
            return func(*args, **kwargs)
        before, _thread.op = _thread.op, None if name in _BACKWARD else Op(name, args, kwargs, [])
        try:
            result = func(*args, **kwargs)
        finally:
            _thread.op = before
        # A result without a gradient, of frozen layers, looks like a buffer later.
        plain = type(result) is torch.Tensor and not result.requires_grad and result._base is None
        if plain and not any(result is arg for arg in args):
            self.made[result] = None
        return result
