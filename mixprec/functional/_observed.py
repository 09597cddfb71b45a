"""observed: a callback for each GEMM and convolution, with its formats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..recipes import OUTLIERS, Recipe

# kind ("forward", "grad_input", "grad_weight"), layer name, format of a, format of b
Observer = Callable[[str, str, str, str], None]

_observer: Observer | None = None
# For audit, with the recipe itself: kind, recipe, name.
listeners: list[Callable[[str, Recipe, str], None]] = []


@contextlib.contextmanager
def observed(callback: Observer) -> Iterator[None]:
    """Call callback(kind, name, a_format, b_format) before each GEMM run inside the block.

    kind: "forward", "grad_input" or "grad_weight"; name: the `name` given to `linear` or `conv2d`,
    whose convolutions count as GEMMs; the formats are names such as "e4m3". A backward pass is
    reported if it runs inside the block; the columns of outliers, in bf16, are not reported apart
    from their product. Blocks nest: the innermost callback is called. The setting
    is global to the process (CUDA's backward runs in a thread of its own) and restored when the
    block ends.
    """
    global _observer
    before, _observer = _observer, callback
    try:
        yield
    finally:
        _observer = before


def observe(kind: str, recipe: Recipe, name: str) -> None:
    """Report a GEMM that is about to run."""
    if _observer is not None and recipe is not OUTLIERS:
        a_format, b_format = getattr(recipe, kind)
        _observer(kind, name, a_format.name, b_format.name)
    if not torch.compiler.is_compiling():  # whose graphs audit reads
        for listener in listeners:
            listener(kind, recipe, name)
