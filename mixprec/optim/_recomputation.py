"""Checkpoints that are computed again while parameters are updated inside backward: what they read
must be what the forward pass has read."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._modes import not_compiled

_lock = threading.Lock()


class UpdatedParams:
    """Those that an optimizer has updated since its last step()."""

    _all: ClassVar[WeakSet[UpdatedParams]] = WeakSet()

    def __init__(self) -> None:
        self._extents: dict[int, list[tuple[int, int]]] = {}  # by storage
        with _lock:
            self._all.add(self)
            # Of all that torch calls to compute a checkpoint again, these have a name.
            if checkpoint._recomputation_hook is not _Recomputation:
                checkpoint._recomputation_hook = _Recomputation  # type: ignore[misc]
                checkpoint.CheckpointFunction.backward = staticmethod(_recompute)  # type: ignore[method-assign]

    def add(self, p: torch.Tensor) -> None:
        self._extents.setdefault(p.untyped_storage()._cdata, []).append(_extent(p))

    def clear(self) -> None:
        self._extents.clear()

    def overlaps(self, t: torch.Tensor) -> bool:
        """Whether t has memory of one of them."""
        if not self._extents or not torch._C._has_storage(t):
            return False
        begin, end = _extent(t)
        extents = self._extents.get(t.untyped_storage()._cdata, ())
        return any(begin < its_end and its_begin < end for its_begin, its_end in extents)

    @classmethod
    def any_overlaps(cls, t: torch.Tensor) -> bool:
        with _lock:
            found = list(cls._all)
        return any(updated.overlaps(t) for updated in found)

    @classmethod
    def is_empty(cls) -> bool:
        with _lock:
            return not any(updated._extents for updated in cls._all)


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage, from the first to behind the last."""
    size = t.element_size()
    begin = int(t.storage_offset()) * size
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (int(last) + 1) * size if t.numel() else begin


class _Reads(TorchDispatchMode):
    """RuntimeError for an op on a param that was updated since the forward pass."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code would run eagerly, with other roundings

    @not_compiled
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs or {})):
            if isinstance(t, torch.Tensor) and UpdatedParams.any_overlaps(t):
                raise RuntimeError(
                    "release_gradients=True: a checkpoint that backward computes again calls "
                    f"{op} on a param of shape {tuple(t.shape)} that was updated since the forward "
                    "pass, because its gradient needs nothing of this checkpoint (detach() or "
                    "no_grad): leave what reads it so out of checkpoints"
                )
        return op(*args, **(kwargs or {}))


_BACKWARD = checkpoint.CheckpointFunction.backward


def _recompute(ctx: Any, *grads: Any) -> Any:
    """The backward pass of a reentrant checkpoint."""
    with contextlib.nullcontext() if UpdatedParams.is_empty() else _Reads():
        return _BACKWARD(ctx, *grads)


class _Recomputation(checkpoint._recomputation_hook):
    """torch's hooks around a checkpoint that is computed again."""

    _reads: _Reads | None = None

    def __enter__(self) -> Any:
        if not UpdatedParams.is_empty():
            self._reads = _Reads()
            self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._reads is not None:
            self._reads.__exit__(*error)
