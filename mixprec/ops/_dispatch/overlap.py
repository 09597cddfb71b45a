"""check_disjoint: no two tensors of a list that is written share memory (in C++: overlap.h)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch


def check_disjoint(op: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError for two tensors that share an element, which threads would write in no order.

    Each of them by itself has passed is_writable.
    """
    by_storage: defaultdict[int, list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        by_storage[t.untyped_storage()._cdata].append(i)
    for indices in by_storage.values():
        if len(indices) == 1:
            continue
        earlier: list[tuple[int, int, int]] = []  # those that may reach the next one
        extents = [(*_extent(tensors[i]), i) for i in indices if tensors[i].numel() > 0]
        for begin, end, i in sorted(extents):
            earlier = [extent for extent in earlier if extent[1] > begin]
            for _, _, j in earlier:
                if _share_memory(tensors[j], tensors[i]):
                    raise ValueError(
                        f"{op}: {name} are written in place, so no two of them may share memory, "
                        f"got {name}[{min(i, j)}] and {name}[{max(i, j)}], which do"
                    )
            earlier.append((begin, end, i))


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Its first byte in the storage, and the one behind its last."""
    size = t.element_size()
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() * size), int((t.storage_offset() + last + 1) * size)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage share a byte."""
    steps: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])  # by stride, of a and of b
    for which, t in enumerate((a, b)):
        size = t.element_size()
        steps[1][which] += size - 1
        for stride, count in zip(t.stride(), t.shape, strict=True):
            if count > 1:
                steps[stride * size][which] += count - 1
    dims = [(stride, -back, on) for stride, (on, back) in sorted(steps.items())]
    return _reaches(dims, _extent(b)[0] - _extent(a)[0])


def _reaches(dims: list[tuple[int, int, int]], distance: int) -> bool:
    """Whether lowest to highest steps of each stride, in ascending order, can add up to
    `distance`."""
    if not dims:
        return distance == 0
    *rest, (stride, lowest, highest) = dims
    low, high = (sum(dim[0] * dim[end] for dim in rest) for end in (1, 2))
    first = max(lowest, -((high - distance) // stride))
    last = min(highest, (distance - low) // stride)
    return any(_reaches(rest, distance - i * stride) for i in range(first, last + 1))
