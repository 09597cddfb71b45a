"""Changes of torch's functions that hold while blocks of audit are open, in whatever thread."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from ..._modes import not_compiled


class Patch:
    """make() returns the change, which the first of the blocks makes and the last one takes back.

    Code that it reaches in other threads has to behave as torch's.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._blocks, self._stack = 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if self._blocks == 0:
                self._stack.enter_context(self._make())
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._stack.close()


@not_compiled
def _force_eager() -> AbstractContextManager[object]:
    # torch loads Dynamo in any case, for the first op under a dispatch mode.
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise RuntimeError(
            "audit: a block cannot begin inside of a function that torch.compile compiles: enter "
            "it around the call"
        ) from error


# What torch.compile has compiled, or is to compile in the block, runs uncompiled: each op is seen.
FORCE_EAGER = Patch(_force_eager)


def is_in_compiled() -> bool:
    """Whether a function that torch.compile has returned runs, in this thread."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = None if dynamo is None else sys._getframe(1)
    while frame is not None:
        is_dynamo = frame.f_globals is vars(dynamo)
        if is_dynamo and isinstance(frame.f_locals.get("self"), dynamo.OptimizeContext):
            return True
        frame = frame.f_back
    return False
