"""What diagnostics write: tables as text, records as lines of JSON, numbers for loggers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_SECONDS = 0.1  # between two lines of Progress
_ERASED = "\r\x1b[K"


def aligned(table: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """The lines of a table, with a rule below its first row. left: the columns of text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def readable(n: int | None) -> str:
    """Bytes with three digits: 9.97 MB, 31.6 MB, 160 MB; "-" if unknown."""
    if n is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size * 0.9995:
            value = n / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{n} B"


def prefixed(n: int) -> str:
    """12,300,000 as "12.3 M", with three digits; nothing for 0."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= 0.9995 * size:
            return f"{n / size:.3g} {unit}"
    return f"{n} " if n else ""


def decibels(value: float | None) -> str:
    """With one digit; "-" if unknown."""
    return "-" if value is None else f"{round(value, 1) + 0.0:.1f}"  # no -0.0


def layer_name(name: str, width: int = sys.maxsize) -> str:
    """The path of a module in so many columns; the model itself has none."""
    return (name if len(name) <= width else "..." + name[3 - width :]) or "(the model)"


def joined(words: Iterable[str], most: int | None = None) -> str:
    """Each once, the first `most` of them."""
    unique = [*dict.fromkeys(words)]
    rest = "" if most is None or len(unique) <= most else f" and {len(unique) - most} more"
    return ", ".join(unique[:most]) + rest or "-"


def finite(value: Any) -> Any:
    """`value` with NaN and Inf, which JSON does not have, as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


class Progress:
    """A line on stderr that each `show` replaces; nothing where stderr is no terminal. It is gone
    at the end of the block."""

    def __init__(self) -> None:
        self._shown = float("-inf")

    def __enter__(self) -> Progress:
        return self

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown >= _SECONDS and sys.stderr is not None and sys.stderr.isatty():
            self._shown = now
            print(f"{_ERASED}{text}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._shown > float("-inf"):
            print(_ERASED, end="", file=sys.stderr, flush=True)
