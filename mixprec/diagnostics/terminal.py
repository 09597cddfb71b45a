"""How far something is, in one line on a terminal."""

from __future__ import annotations

import sys
import time

_SECONDS = 0.1  # between two of them
_ERASED = "\r\x1b[K"


class Line:
    """A line on stderr that each `show` replaces; nothing where stderr is no terminal. It is gone
    at the end of the block."""

    def __init__(self) -> None:
        self._shown = float("-inf")

    def __enter__(self) -> Line:
        return self

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _SECONDS and sys.stderr is not None and sys.stderr.isatty():
            self._shown = now
            print(f"{_ERASED}{text}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._shown > float("-inf"):
            print(_ERASED, end="", file=sys.stderr, flush=True)
