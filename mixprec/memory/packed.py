"""A saved tensor as codes, shared by the ops that save the same elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._context import context, replaced
from ..ops._dispatch.checks import is_dense
from ..ops.pack import pack, unpack


class Codes:
    """The codes and ranges of `pack`, of a tensor's elements in row-major order."""

    def __init__(
        self,
        x: torch.Tensor,
        bits: int,
        seed: int,
        counter: int,
        offset: torch.Tensor | None,
    ) -> None:
        self.shape, self.dtype, self.bits = x.shape, x.dtype, bits
        self.codes, self.ranges = pack(x, bits, seed=seed, counter=counter, offset=offset)
        self.backend = context.backend

    def unpack(self) -> torch.Tensor:
        with replaced("backend", self.backend):
            return unpack(self.codes, self.ranges, self.bits, self.shape, self.dtype)


Make = Callable[[torch.Tensor, int], Codes]  # of (x, bits)
Pieces = tuple[Codes | torch.Tensor, ...]


class Form(ABC):
    """How a tensor is kept. flat: `encode` takes its elements in the order of memory, [n], and
    `decode` returns them; otherwise both see the tensor itself. Forms are frozen dataclasses."""

    flat: ClassVar[bool] = True
    decode: Callable[..., torch.Tensor]  # of the pieces, with codes unpacked

    @abstractmethod
    def encode(self, t: torch.Tensor, make: Make) -> Pieces: ...

    @property
    def served_by(self) -> tuple[Form, ...]:
        """The forms that another op may have saved t in and that do as well."""
        return (self,)


class Parts:
    """What a form keeps of a tensor. counter: of its first codes; sequence: of the op that saved
    it first."""

    def __init__(self, form: Form, pieces: Pieces, counter: int, sequence: int) -> None:
        self.form, self.pieces, self.counter, self.sequence = form, pieces, counter, sequence

    def unpack(self) -> torch.Tensor:
        return self.form.decode(*(p.unpack() if isinstance(p, Codes) else p for p in self.pieces))

    def same_codes(self, other: Parts) -> bool:
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)

    def _tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for p in self.pieces:
            tensors += (p.codes, p.ranges) if isinstance(p, Codes) else (p,)
        return tensors

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)  # NaN is equal to itself


class Version:
    """Of a tensor's elements, which writes in place count. It does not keep them alive."""

    def __init__(self, t: torch.Tensor) -> None:
        self.what, self.expected = _name(t), t._version
        self.counter = t.detach()  # shares the counter, also without elements
        self.counter.data = t.new_empty(0)

    def check(self) -> None:
        _check_version(self.counter, self.expected, self.what)


def _name(t: torch.Tensor) -> str:
    return f"{t.dtype} of shape {tuple(t.shape)}"


def _check_version(t: torch.Tensor, expected: int, what: str) -> None:
    if t._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {what} is at version {t._version}; expected version {expected}"
        )


class Saved(NamedTuple):
    """What autograd holds in place of a tensor."""

    parts: Parts
    shape: torch.Size
    stride: tuple[int, ...]
    version: Version

    def unpack(self) -> torch.Tensor:
        self.version.check()
        t = self.parts.unpack()
        if self.parts.form.flat:
            return t.as_strided(self.shape, self.stride)
        if t.stride() == self.stride or t.numel() == 0:  # of `Dropped` too
            return t
        return _with_strides(t, self.stride)


class Kept:
    """A tensor as it is. Without hooks torch itself compares the versions."""

    def __init__(self, t: torch.Tensor) -> None:
        # Without its history: that of an op's result holds the op, which holds this.
        self.tensor = t.detach() if type(t) is torch.Tensor else t
        self.version = t._version

    def unpack(self) -> torch.Tensor:
        _check_version(self.tensor, self.version, _name(self.tensor))
        return self.tensor


def _with_strides(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def _offset(x: torch.Tensor) -> torch.Tensor | None:
    """While a graph is captured, in which seed and counter are constants: a number of torch's
    generator of the device, which draws another one in each replay. Otherwise None."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**62, (1,), dtype=torch.int64, device=x.device)
    return None


class Packer:
    """Packs each tensor once where it can. The n-th codes have counter n in the random numbers."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.counter = seed, 0
        # By the storage itself, not its address, which is used again when a storage is freed. A
        # weak reference keeps neither the values nor the codes alive.
        self._known: WeakValueDictionary[tuple[object, ...], Parts] = WeakValueDictionary()

    @torch.no_grad()
    def pack(self, t: torch.Tensor, form: Form, sequence: int, newest: int) -> Saved:
        """t in `form`. sequence: of the op that saves t; newest: of the op's operands.

        Parts that another op saved before serve again, unless an operand was computed after that:
        gradients may pass through both ops, and the product of an error with itself has no mean of
        zero. On the CPU they are compared, to see a write through `.data`, which has no version.
        """
        version, t = Version(t), t.detach()
        where: tuple[object, ...] = t.storage_offset(), t.numel(), t.is_neg()
        stride, dense = t.stride(), is_dense(t)
        if not dense:  # such as v in the projection of q, k and v: without the gaps
            stride = torch.empty_like(t, device="meta").stride()
        if not (dense and form.flat):
            where = (*where, t.shape, t.stride())
        key = (StorageWeakRef(t.untyped_storage()), t._version, t.dtype, *where)

        def encode(form: Form, counter: int) -> Parts:
            return self._encode(t if dense else _with_strides(t, stride), form, counter, sequence)

        for served in form.served_by:
            parts = self._known.get((*key, served))
            if parts is None or newest >= parts.sequence:
                continue
            seen = sequence == parts.sequence or t.device.type != "cpu"  # there, it would wait
            if seen or parts.same_codes(encode(served, parts.counter)):
                return Saved(parts, t.shape, stride, version)
        parts = encode(form, self.counter)
        self.counter += sum(isinstance(piece, Codes) for piece in parts.pieces)
        known = (*key, form)
        self._known[known] = parts
        return Saved(parts, t.shape, stride, version)

    def _encode(self, t: torch.Tensor, form: Form, counter: int, sequence: int) -> Parts:
        """t: dense."""
        counters = count(counter)

        def make(x: torch.Tensor, bits: int) -> Codes:
            offset = _offset(x)
            if self.seed is None and offset is None:
                self.seed = int(torch.randint(2**62, (), device="cpu"))
            return Codes(x, bits, self.seed or 0, next(counters), offset)

        pieces = form.encode(t.as_strided((t.numel(),), (1,)) if form.flat else t, make)
        return Parts(form, pieces, counter, sequence)
