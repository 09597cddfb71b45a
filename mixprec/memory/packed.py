"""A saved tensor as codes, shared by all ops that save the same elements."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..ops._dispatch import backends
from ..ops.pack import pack, unpack

__all__ = ["Codes", "Kept", "Packer", "Saved"]


class Codes:
    """The codes and ranges of `pack`, of the elements of one tensor in the order of memory."""

    def __init__(self, flat: torch.Tensor, bits: int, seed: int, counter: int) -> None:
        self.numel, self.dtype, self.bits = flat.numel(), flat.dtype, bits
        self.codes, self.ranges = pack(flat, bits, seed=seed, counter=counter)
        self.backend = backends.forced()

    def unpack(self) -> torch.Tensor:
        with backends.restored(self.backend):
            return unpack(self.codes, self.ranges, self.bits, (self.numel,), self.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.ranges.nbytes


class Saved(NamedTuple):
    """What autograd holds in place of a tensor."""

    codes: Codes
    shape: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> torch.Tensor:
        return self.codes.unpack().as_strided(self.shape, self.stride)


class Kept(NamedTuple):
    """A tensor as it is. Without hooks torch itself compares the versions."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.dtype} of shape {tuple(self.tensor.shape)} is at "
                f"version {self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


def _is_dense(t: torch.Tensor) -> bool:
    """Whether the elements of t, in some order of its dimensions, fill a piece of memory."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Packer:
    """Packs each tensor once. The n-th that it packs has counter n in the random numbers."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.counter = seed, 0
        # By the storage itself, not its address, which is used again when a storage is freed. A
        # weak reference keeps neither the values nor the codes alive.
        self._known: WeakValueDictionary[tuple[object, ...], Codes] = WeakValueDictionary()

    @torch.no_grad()
    def pack(self, t: torch.Tensor, bits: int) -> Saved:
        t = t.detach()
        where: tuple[object, ...] = t.storage_offset(), t.numel(), t.is_neg()
        stride = t.stride()
        if not _is_dense(t):  # such as v in the projection of q, k and v: without the gaps
            where = (*where, t.shape, stride)
            stride = torch.empty_like(t, device="meta").stride()
        key = (StorageWeakRef(t.untyped_storage()), t._version, t.dtype, *where)
        own = (*key, bits)
        for more in (8, 4):
            codes = self._known.get((*key, more)) if more >= bits else None
            if codes is not None:
                return Saved(codes, t.shape, stride)
        if not _is_dense(t):
            t = torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
        if self.seed is None:
            self.seed = int(torch.randint(2**62, (), device="cpu"))
        flat = t.as_strided((t.numel(),), (1,))
        self._known[own] = codes = Codes(flat, bits, self.seed, self.counter)
        self.counter += 1
        return Saved(codes, t.shape, stride)
