"""Whether tensors of which one is written share memory (in C++: overlap.h)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch


def check_disjoint(op: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError for two tensors that share an element, which threads would write in no order.

    Each of them by itself has passed is_writable. As in torch, two views with gaps, such as columns
    of one matrix, may reach into each other's range: whether they share an element is not looked
    for.
    """
    extents = defaultdict(list)
    for i, t in enumerate(tensors):
        if t.numel() > 0:
            begin, end = map(int, extent(t))
            extents[t.untyped_storage()._cdata].append((begin, end, i))
    for found in extents.values():
        reaching: list[tuple[int, int, int]] = []  # those that may reach the next one
        for begin, end, i in sorted(found):
            reaching = [other for other in reaching if other[1] > begin]
            for first, _, j in reaching:
                if first == begin or (is_dense(tensors[i]) and is_dense(tensors[j])):
                    raise ValueError(
                        f"{op}: {name} are written in place, so no two of them may share memory, "
                        f"got {name}[{min(i, j)}] and {name}[{max(i, j)}], which do"
                    )
            reaching.append((begin, end, i))


def ranges_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y share a storage and their ranges in it overlap."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = extent(x), extent(y)
    return bool(x0 < y1 and y0 < x1)


def extent(t: torch.Tensor) -> tuple[Any, Any]:
    """Its first byte in the storage, and the one behind its last, which torch.compile may not know
    as numbers."""
    first, size = t.storage_offset(), t.dtype.itemsize
    last = first + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return first * size, (last + 1) * size


def is_dense(t: torch.Tensor) -> bool:
    """The elements, in some order of the dimensions, fill a range of memory without gaps."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
