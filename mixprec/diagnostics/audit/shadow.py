"""The shadow of a step: what each op would have returned in FP32, beside what it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...recipes import Recipe
from . import reference
from .ops import Call, tensors
from .reference import FLOATS, is_float, widened

_OF_LAYERS = ("product", "convolution")
_SWEEP = 32  # ops between two searches for storages that are no more
Mark = TypeVar("Mark")
Known = Callable[[], torch.Tensor] | None


class Ran(NamedTuple):
    """Of an op that has run, in FP32: what it returns of its own operands as they were before they
    were cast for it, and, if they are others, of those of the whole step in FP32. again: computes
    it of other values of the operands."""

    own: reference.Results
    total: reference.Results
    again: Callable[[reference.Value], reference.Results]


class Shadow:
    """Computes each op a second time in FP32, from what the ops before it would have returned.

    Random draws and the choices of topk, sort and max follow the step. not_followed: how often an
    op could not be computed again: from there the shadow has what the step has.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], what_if: Mapping[str, Recipe] | None = None
    ) -> None:
        self.what_if = what_if or {}
        self.made = 0.0  # the spacing at 1 of weights and inputs that were made in few bits
        self.formats: Marks[reference.Cast] = Marks()  # of casts, the coarsest one
        self.roles: Marks[str] = Marks()  # "w" of parameters, "g" of what backward returns
        for p in params:
            self.roles.put(p, "w")
        self.total = Values()  # of a step in FP32
        self.before = Values()  # of results of casts: what was cast
        self.not_followed: Counter[str] = Counter()
        self._until_sweep = _SWEEP
        self._written: list[torch.Tensor] = []
        self._ids: set[int] = set()  # of all that the op writes to
        self._started: list[torch.Tensor] = []

    def clear(self) -> None:
        """A step has changed the weights."""
        self.total.clear()
        self.before.clear()

    def prepare(self, call: Call) -> None:
        """Before the op runs: keep what it is going to overwrite."""
        written = [] if reference.moves(call.func) else written_by(call)
        self._ids = {id(t) for t in written}
        self._written = [t for t in written if is_float(t)]
        self._started = []
        if not self._written or _is_strange(call.inputs) or not self._is_affected(call.inputs):
            return
        if call.listed is not None:  # its own error is that of the product and the sum
            self._started = [widened(t).clone() for t in self._written]
        if call.func not in reference.TORCHS_CASTS:
            for t in self._written:
                self.total.start(t)

    def follow(self, call: Call) -> Ran | None:
        """After the op has run. None: nothing that it had or returned is rounded, or it is not
        known what it computes."""
        self._until_sweep -= 1
        if not self._until_sweep:
            self._until_sweep = _SWEEP
            for held in (self.total, self.before, self.roles, self.formats):
                held.sweep()
        func, listed, inputs, results = call.func, call.listed, call.inputs, call.results
        written = self._written
        if func.is_view or reference.moves(func):
            return None
        affected = self._is_affected(inputs + results) or (
            reference.has_codes(func)
            or (bool(self.what_if) and listed is not None and listed.kind in _OF_LAYERS)
        )
        if not reference.is_known(func) or not inputs or not affected:
            self._take(written)
            return None
        if not written and results and shares(results[0], inputs):
            return None  # a view whose schema does not say so
        if reference.is_random(call):
            if listed is not None or reference.is_drawn_from(func):
                self.not_followed[func.name()] += 1
            self._take(written)
            return None
        if not reference.is_opaque(func) and not _is_strange(inputs + results):
            with suppress(RuntimeError, ValueError, TypeError), torch.no_grad():
                return self._run(call)
        self.not_followed[func.name()] += 1
        self._take([*written, *results])
        return None

    def mark(self, call: Call, is_backward: bool) -> None:
        """After the op has run: the roles of its results, and the formats of casts."""
        func, inputs, results = call.func, call.inputs, call.results
        if func.is_view or not results or not (inputs or is_backward):
            return
        is_cast = reference.is_cast(func) and len(inputs) > 0
        source = results[0] if not inputs else inputs[1] if func is reference.COPY else inputs[0]
        carried = self.roles.get(source) if is_cast or func in reference.PARTS else None
        role = carried or ("g" if is_backward and not is_cast else None)
        fmt, before = None, self.formats.get(source)
        if is_cast:
            fmt = reference.cast_format(call)
            if before is not None and (fmt is None or reference.eps(before) > reference.eps(fmt)):
                fmt = before
        for t in results:
            if role is not None and not shares(t, inputs):
                self.roles.put(t, role)
            if fmt is not None:
                self.formats.put(t, fmt)

    def own(self, t: torch.Tensor, known: Known = None) -> torch.Tensor:
        """The values of an operand before it was cast. known: those of codes without any."""
        values = self.before.get(t)
        if values is not None:
            return values
        if known is not None:
            return known()
        return widened(t) if t.dtype in FLOATS else t

    def of_step(self, t: torch.Tensor, known: Known = None) -> torch.Tensor:
        """The values of an operand in the whole step in FP32."""
        values = self.total.get(t)
        if values is not None:
            return values
        if t.dtype in FLOATS and t.dtype.itemsize < 4 and self.before.packed(t) is None:
            self.made = max(self.made, torch.finfo(t.dtype).eps)
        return self.own(t, known)

    def _run(self, call: Call) -> Ran:
        func, args, written, is_cast = call.func, call.args, self._written, self._is_cast(call)
        protects, ids = func.overloadpacket in reference.WRITES_MORE, self._ids
        differs = any(self.total.packed(t) is not None for t in call.inputs)
        before = {id(t): kept for t, kept in zip(written, self._started, strict=False)}

        def compute(value: reference.Value, packed: reference.Packed) -> reference.Results:
            def safe(t: torch.Tensor, known: Known = None) -> torch.Tensor:
                values = value(t, known)
                is_written = values is t and id(t) in ids
                return values.clone() if protects or is_written else values

            return reference.results(call, safe, packed)

        def again(value: reference.Value) -> reference.Results:
            def unwritten(t: torch.Tensor, known: Known = None) -> torch.Tensor:
                kept = before.get(id(t))
                return value(t, known) if kept is None else kept.clone()

            return compute(unwritten, self.before.packed)

        own: reference.Results = []
        total: reference.Results
        if func is reference.COPY:
            source, shape = args[1], args[0].shape
            own = [self.own(source).expand(shape).clone()]
            total = [self.of_step(source).expand(shape).clone()]
            targets = [args[0]]
        else:
            targets = written or call.results
            if call.listed is not None or (not written and (is_cast or not differs)):
                own = again(self.own)
            total = compute(self.of_step, self.total.packed) if differs or written else own
        self._keep(targets, own, total, is_cast, bool(written))
        return Ran(own, total, again)

    def _is_cast(self, call: Call) -> bool:
        """To fewer bits, or of what has been cast to fewer bits."""
        if call.func not in reference.TORCHS_CASTS:
            return reference.is_cast(call.func)
        source: torch.Tensor = call.args[1 if call.func is reference.COPY else 0]
        bits = call.result.dtype.itemsize
        narrows = source.is_floating_point() and bits < source.dtype.itemsize
        return narrows or self.before.packed(source) is not None

    def _keep(
        self,
        targets: list[torch.Tensor],
        own: reference.Results,
        total: reference.Results,
        is_cast: bool,
        in_place: bool,
    ) -> None:
        for t, value in zip(targets, total, strict=False):
            there = self.total.get(t) if in_place else None
            if value is not None and not (there is not None and value.is_set_to(there)):
                self.total.put_any(t, value)
        for t in targets if in_place and not is_cast else ():
            self.before.drop(t)
        for t, value in zip(targets, own if is_cast else (), strict=False):
            if value is not None:
                self.before.put_any(t, value)

    def _is_affected(self, values: Iterable[Any]) -> bool:
        """Whether an op with these arguments and results has anything to do with rounding."""
        for t in values:
            if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_meta:
                if t.dtype in FLOATS and t.dtype.itemsize < 4:
                    return True
                if self.total.packed(t) is not None or self.before.packed(t) is not None:
                    return True
        return False

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        """The shadow of these is what they are."""
        for t in tensors:
            if is_float(t) and self.total.get(t) is not None:
                self.total.put(t, widened(t))
            elif self.total.packed(t) is not None:
                self.total.drop(t)
            self.before.drop(t)


def _is_strange(values: Iterable[Any]) -> bool:
    """Whether one of them is a tensor whose elements are not FP32's, or not in one memory."""
    return any(
        t.is_complex() or t.layout is not torch.strided or t.is_nested or t.is_meta
        for t in values
        if isinstance(t, torch.Tensor)
    )


def written_by(call: Call) -> list[torch.Tensor]:
    """The tensors that the op writes to, as its schema has it, but for the amax of a cast."""
    schema = call.func._schema
    arguments = schema.arguments if schema.is_mutable else ()
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names if name != "record" for t in tensors(call.given[name])]


class Marks(Generic[Mark]):
    """What is known of storages, until they are no more."""

    def __init__(self) -> None:
        # By address, which the reference keeps from another storage.
        self._held: dict[int, tuple[StorageWeakRef, Mark]] = {}

    def get(self, t: torch.Tensor) -> Mark | None:
        held = self._held.get(_address(t))
        return None if held is None or held[0].expired() else held[1]

    def put(self, t: torch.Tensor, mark: Mark) -> None:
        if _address(t) != _NONE:
            self._held[_address(t)] = StorageWeakRef(t.untyped_storage()), mark

    def drop(self, t: torch.Tensor) -> None:
        self._held.pop(_address(t), None)

    def clear(self) -> None:
        self._held.clear()

    def sweep(self) -> None:
        for address in [a for a, (owner, _) in self._held.items() if owner.expired()]:
            del self._held[address]

    def __len__(self) -> int:
        return len(self._held)


class _Held(NamedTuple):
    """values: one for each element of dtype in the storage, or, of packed codes, in the order of
    what was packed."""

    dtype: torch.dtype
    values: torch.Tensor
    is_packed: bool


class Values:
    """By storage, so that all views of one, also those that autograd has saved, have the same."""

    def __init__(self) -> None:
        self._held: Marks[_Held] = Marks()
        self.drop, self.clear, self.sweep = self._held.drop, self._held.clear, self._held.sweep

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
            flat = _storage_values(t) if t.numel() < size else values.new_empty(size)
            flat.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(values)
        self._held.put(t, _Held(t.dtype, flat, False))

    def put_any(self, t: torch.Tensor, values: torch.Tensor) -> None:
        """values: of t's shape, or what the codes t stand for."""
        if values.shape == t.shape:
            self.put(t, values)
        elif values.numel():
            self._held.put(t, _Held(t.dtype, values.reshape(-1), True))

    def start(self, t: torch.Tensor) -> None:
        """From now on t has values of its own."""
        if self.get(t) is None:
            self._held.put(t, _Held(t.dtype, _storage_values(t), False))

    def _find(self, t: torch.Tensor) -> _Held | None:
        held = self._held.get(t)
        is_whole = held is not None and (held.is_packed or held.values.numel() == _elements(t))
        return held if is_whole else None


def shares(t: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether t has the storage of another."""
    address = _address(t)
    return address != _NONE and any(address == _address(other) for other in others)


_NONE = 0  # of a sparse tensor, which has several storages


def _address(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else _NONE


def _elements(t: torch.Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size()


def _storage_values(t: torch.Tensor) -> torch.Tensor:
    """A copy of all that t's storage has."""
    flat = t.detach().as_strided((_elements(t),), (1,), 0)
    return flat.clone() if flat.dtype.itemsize >= 4 else flat.float()
