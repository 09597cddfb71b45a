"""Changes of torch's functions that hold while blocks of audit are open, in whatever thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


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
            self._blocks += 1
            if self._blocks == 1:
                self._stack.enter_context(self._make())
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._stack.close()
