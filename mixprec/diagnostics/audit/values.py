"""Values: FP32 values that stand for the elements of a tensor, beside those that it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*_REAL, torch.float8_e4m3fn, torch.float8_e5m2)

Mark = TypeVar("Mark")


def is_float(t: torch.Tensor) -> bool:
    """Whether t has values: floating-point numbers, in one memory that is there."""
    is_plain = t.layout is torch.strided and not (t.is_neg() or t.is_nested or t.is_meta)
    return is_plain and t.dtype in FLOATS


def widened(t: torch.Tensor) -> torch.Tensor:
    """In FP32; FP64 as it is."""
    return t.float() if t.dtype.itemsize < 4 else t


class _Held(NamedTuple):
    """owner keeps the address from another storage. values: one for each element of dtype in the
    storage, or, of packed codes, in the order of what was packed."""

    owner: StorageWeakRef
    dtype: torch.dtype
    values: torch.Tensor
    is_packed: bool


class Values:
    """By storage, so that all views of one, also those that autograd has saved, have the same."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, t: torch.Tensor) -> torch.Tensor | None:
        """A view of the values of t's elements; None: they are t's own."""
        held = self._find(t)
        if held is None or held.is_packed or held.dtype != t.dtype:
            return None
        return held.values.as_strided(t.shape, t.stride(), t.storage_offset())

    def packed(self, t: torch.Tensor) -> torch.Tensor | None:
        """What the codes t stand for, in one dimension, in the order in which it was packed."""
        held = self._find(t)
        return None if held is None else held.values

    def put(self, t: torch.Tensor, values: torch.Tensor) -> None:
        """values: of t's shape, and not used elsewhere."""
        there = self.get(t)
        if there is not None:
            there.copy_(values)
            return
        size = _elements(t)
        if t.numel() == size and values.stride() == t.stride() and t.storage_offset() == 0:
            flat = values.as_strided((size,), (1,))
        else:
            flat = _whole(t) if t.numel() < size else values.new_empty(size)
            flat.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(values)
        self._hold(t, flat, False)

    def put_packed(self, t: torch.Tensor, values: torch.Tensor) -> None:
        self._hold(t, values.reshape(-1), True)

    def start(self, t: torch.Tensor) -> torch.Tensor:
        """The values of t, from now on its own."""
        found = self.get(t)
        if found is None:
            self._hold(t, _whole(t), False)
            found = self.get(t)
            assert found is not None
        return found

    def drop(self, t: torch.Tensor) -> None:
        self._held.pop(_address(t), None)

    def clear(self) -> None:
        self._held.clear()

    def sweep(self) -> None:
        """Free the values of storages that are no more."""
        gone = [address for address, held in self._held.items() if held.owner.expired()]
        for address in gone:
            del self._held[address]

    def _find(self, t: torch.Tensor) -> _Held | None:
        held = self._held.get(_address(t))
        if held is None or held.owner.expired():
            return None
        return held if held.is_packed or held.values.numel() == _elements(t) else None

    def _hold(self, t: torch.Tensor, values: torch.Tensor, is_packed: bool) -> None:
        owner = StorageWeakRef(t.untyped_storage())
        self._held[_address(t)] = _Held(owner, t.dtype, values, is_packed)


class Marks(Generic[Mark]):
    """Something that is known of storages."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, Mark]] = {}

    def get(self, t: torch.Tensor) -> Mark | None:
        held = self._held.get(_address(t))
        return None if held is None or held[0].expired() else held[1]

    def put(self, t: torch.Tensor, mark: Mark) -> None:
        if _address(t) == _NONE:
            return
        self._held[_address(t)] = StorageWeakRef(t.untyped_storage()), mark

    def sweep(self) -> None:
        for address in [a for a, (owner, _) in self._held.items() if owner.expired()]:
            del self._held[address]


def shares(t: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether t has the storage of another."""
    address = _address(t)
    return address != _NONE and any(address == _address(other) for other in others)


_NONE = 0  # of a sparse tensor, which has several storages


def _address(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else _NONE


def _elements(t: torch.Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size()


def _whole(t: torch.Tensor) -> torch.Tensor:
    """A copy of all that t's storage has."""
    whole = t.detach().as_strided((_elements(t),), (1,), 0)
    return whole.clone() if whole.dtype.itemsize >= 4 else whole.float()
