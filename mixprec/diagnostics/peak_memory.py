"""Who holds the memory of a process when most is in use, and the gradients that exist at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..memory import caching_allocator
from ..memory.packed import Saved
from .passes import tensors


class LiveGradients:
    """Measures, from the nodes of a loss, what waits for `grad` to be complete: `largest`, in
    bytes. The gradient of a parameter exists from the first node that computes a part of it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.largest = 0
        self._live: dict[Any, int] = {}
        for node in nodes(loss.grad_fn):
            if hasattr(node, "variable"):  # it accumulates into a leaf
                node.register_hook(partial(self._remove, node))
            elif any(hasattr(edge, "variable") for edge, _ in node.next_functions):
                node.register_hook(partial(self._add, node))

    def _remove(self, node: Any, *_: Any) -> None:
        self._live.pop(node, None)

    def _add(self, node: Any, grads: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for (edge, _), grad in zip(node.next_functions, grads, strict=True):
            if grad is not None and hasattr(edge, "variable"):
                self._live[edge] = grad.numel() * grad.element_size()
        self.largest = max(self.largest, sum(self._live.values()))


def nodes(root: Any) -> Iterator[Any]:
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [edge for edge, _ in node.next_functions]
            yield node


class Usage(NamedTuple):
    """Bytes that a device, or the heap of the process, has given out, and that are freed and kept
    from the system."""

    used: int
    free: int


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


@cache
def _mallinfo() -> Callable[[], Any] | None:
    """glibc's, from 2.33 on."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo
    return function


def usage(device: torch.device) -> Usage | None:
    """None if unknown."""
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        return Usage(used, torch.cuda.memory_reserved(device) - used)
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None
    heap, cached = mallinfo(), caching_allocator.memory_allocated()
    free = caching_allocator.memory_reserved() - cached
    return Usage(heap.uordblks + heap.hblkhd + cached, heap.fordblks + free)


def resident(field: str) -> int | None:
    """A size of the process as Linux has it: VmRSS, VmHWM (the largest), RssFile (what it has of
    files, which are the libraries that it has loaded)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None
    )


class MostInUse:
    """Looks at the memory in use whenever a tensor is saved, and before each node of a backward
    pass: `moment`, and `held`, bytes by who holds them then, empty if unknown."""

    def __init__(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        self.moment, self.held = "", dict[str, int]()
        self._params, self._device = params, device
        self._before, self._most = usage(device), -1
        self._saved: list[tuple[str, int, Callable[[], bool]]] = []  # kind, bytes, whether freed

    def add(self, kind: str, size: int, kept: torch.Tensor | Saved) -> None:
        """Something of this many bytes was saved."""
        freed: Callable[[], bool]
        if isinstance(kept, Saved):
            parts = ref(kept.parts)
            freed = lambda: parts() is None  # noqa: E731
        else:
            freed = StorageWeakRef(next(iter(tensors(kept))).untyped_storage()).expired
        self._saved.append((kind, size, freed))
        self._look(f"forward, {kind}")

    def watch(self, loss: torch.Tensor) -> None:
        """Look at the backward pass of loss."""
        self._look("the end of forward")
        for node in nodes(loss.grad_fn):
            node.register_prehook(partial(self._look, f"backward, {node.name()}"))

    def _look(self, moment: str, *_: Any) -> None:
        now = usage(self._device)
        if now is None or self._before is None or now.used <= self._most:
            return
        self._most, self.moment = now.used, moment
        grads = [p.grad for p in self._params if p.grad is not None]
        held = {"gradients": sum(g.numel() * g.element_size() for g in grads)}
        for kind, size, freed in self._saved:
            if not freed():
                held[f"saved: {kind}"] = held.get(f"saved: {kind}", 0) + size
        rest = now.used - self._before.used - sum(held.values())
        self.held = {"before the pass": self._before.used, **held, "other": rest, "freed": now.free}
