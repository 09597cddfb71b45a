"""Layers of encoders whose MLP is two modules, called by a method: it runs as one function."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from . import _region
from ._content import KnownContents
from ._fused import Part
from .known import FirstHalf, SecondHalf, spec_of

METHOD = "feed_forward_chunk"
_FRAMES = 6  # between the forward pass of a layer and its method, with wrappers
# The content of feed_forward_chunk(x) that is output(intermediate(x), x), of 40 classes of
# transformers 5.24.
_CONTENTS = KnownContents({"687b008a14f8402d"})


class FusedFeedForward:
    """`feed_forward_chunk` of one layer, as an attribute of it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not torch.compiler.is_compiling() and (other := self._other_caller()) is not None:
            layer = other
        elif len(args) == 1 and not kwargs and (found := feed_forward_of(layer)) is not None:
            part, second = found
            if part.is_fused(args[0]):
                with _region.without_modes():
                    (y,) = part.run(args[0])
                return second.norm(second.dropout(y) + args[0])
        return getattr(type(layer), METHOD)(layer, *args, **kwargs)

    def _other_caller(self) -> nn.Module | None:
        """The layer whose forward pass calls this, if it is another one: a shallow copy, or a
        replica of DataParallel."""
        frame: Any = sys._getframe(2)
        for _ in range(_FRAMES):
            caller = frame.f_locals.get("self") if frame is not None else None
            if isinstance(caller, nn.Module) and vars(caller).get(METHOD) is self:
                return caller if caller is not self.layer else None
            frame = frame and frame.f_back
        return None

    @property
    def __signature__(self) -> inspect.Signature:
        """For transformers, which counts the arguments."""
        return inspect.signature(getattr(type(self.layer), METHOD).__get__(self.layer))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _CONTENTS.get(getattr(type(self.layer), METHOD))  # before the model is compiled


def feed_forward_of(layer: nn.Module) -> tuple[Part, SecondHalf] | None:
    """The MLP of such a layer, and what follows; None for any other module."""
    method: Any = getattr(type(layer), METHOD, None)
    own = vars(layer).get(METHOD)
    if not isinstance(method, FunctionType) or _CONTENTS.get(method) is None:
        return None
    if own is not None and not isinstance(own, FusedFeedForward):
        return None
    halves: Any = layer.intermediate, layer.output
    first, second = map(spec_of, halves)
    if not (isinstance(first, FirstHalf) and isinstance(second, SecondHalf)):
        return None
    return Part([first.dense], act=first.act, last=second.dense, around=halves), second


def unfuse_feed_forward(module: nn.Module) -> None:
    if isinstance(vars(module).get(METHOD), FusedFeedForward):
        delattr(module, METHOD)
