"""What blocks have set for the thread that entered them: one object for all of them.

`autocast` and `simulate` are function modes of torch, which are per thread as well.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Context(threading.local):
    def __init__(self) -> None:
        # Attributes of each thread, not of the class: torch.compile has guards on those it reads.
        self.backend: str | None = None  # use_backend
        self.twice_differentiable = False
        self.casts: list[list[Any]] = []  # of share_casts, for each module that runs
        self.hooks = 0  # blocks in which saved tensors are compressed or counted
        self.record: Callable[..., None] | None = None  # of saved tensors
        self.op: Any = None  # memory.running: what autograd saves tensors for
        self.over: dict[str, Any] = {}  # over which ranks stacked weights are split, by name
        self.plain = False  # autocast(enabled=False) runs an op


context = _Context()


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """One of the values inside a block; the one before after it, also after an exception."""
    before = getattr(context, name)
    setattr(context, name, value)
    try:
        yield
    finally:
        setattr(context, name, before)
