"""One line in place of a traceback where a program's package is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(packages: str) -> Iterator[None]:
    """An import that fails inside ends the program and says what to install: `packages`."""
    try:
        yield
    except ImportError as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        sys.exit(f"error: {reason}: pip install {packages}")
