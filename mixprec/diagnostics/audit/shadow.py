"""The shadow of a step: what each op would have returned in FP32, beside what it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ...recipes import Recipe
from . import reference
from .ops import Listed, arguments
from .reference import FLOATS, is_float, widened

_OF_LAYERS = ("product", "convolution")
_SWEEP = 32  # ops between two searches for storages that are no more
Mark = TypeVar("Mark")


class Ran:
    """Of an op that has run, in FP32: what it returns of `inputs`, its own operands as they were
    before they were cast for it, and, if they are others, of those of the whole step in FP32.
    again: computes it of other values of the operands."""

    def __init__(
        self,
        own: reference.Results,
        total: reference.Results,
        again: Callable[[reference.Value], reference.Results],
    ) -> None:
        self.own, self.total, self.again = own, total, again


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
        self._since_sweep = 0
        self._written: list[torch.Tensor] = []
        self._ids: set[int] = set()  # of all that the op writes to
        self._started: list[torch.Tensor] = []

    def clear(self) -> None:
        """A step has changed the weights."""
        self.total.clear()
        self.before.clear()

    def prepare(self, func: Any, args: Any, kwargs: Any, listed: Listed | None) -> None:
        """Before func runs: keep what it is going to overwrite."""
        written = [] if reference.moves(func) else _written(func, args, kwargs)
        self._ids = {id(t) for t in written}
        self._written = [t for t in written if is_float(t)]
        self._started = []
        leaves = tree_leaves((args, kwargs))
        if not self._written or _is_strange(leaves) or not self._is_affected(leaves):
            return
        if listed is not None:  # its own error is that of the product and the sum
            self._started = [widened(t).clone() for t in self._written]
        if func not in reference.TORCHS_CASTS:
            for t in self._written:
                self.total.start(t)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any, listed: Any) -> Ran | None:
        """After func has run. None: nothing that it had or returned is rounded, or it is not known
        what it computes."""
        self._since_sweep += 1
        if self._since_sweep >= _SWEEP:
            self._since_sweep = 0
            self.total.sweep()
            self.before.sweep()
            self.roles.sweep()
            self.formats.sweep()
        if func.is_view or reference.moves(func):
            return None
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        written, started = self._written, self._started
        affected = self._is_affected(inputs + results) or (
            reference.has_codes(func)
            or (bool(self.what_if) and listed is not None and listed.kind in _OF_LAYERS)
        )
        if not reference.is_known(func) or not inputs or not affected:
            self._take(written)
            return None
        if not written and results and shares(results[0], inputs):
            return None  # a view whose schema does not say so
        if reference.is_random(func, arguments(func, args, kwargs)):
            if listed is not None or reference.is_drawn_from(func):
                self.not_followed[func.name()] += 1
            self._take(written)
            return None
        if reference.is_opaque(func) or _is_strange(inputs + results):
            self.not_followed[func.name()] += 1
            self._take([*written, *results])
            return None
        try:
            with torch.no_grad():
                return self._run(func, args, kwargs, result, results, listed is not None, started)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            self.not_followed[func.name()] += 1
            self._take([*written, *results])
            return None

    def mark(
        self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor], is_backward: bool
    ) -> None:
        """After func has run: the roles of its results, and the formats of casts."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.is_view or not results or not (inputs or is_backward):
            return
        is_cast = reference.is_cast(func) and len(inputs) > 0
        source = results[0] if not inputs else inputs[1] if func is reference.COPY else inputs[0]
        carried = self.roles.get(source) if is_cast or func in reference.PARTS else None
        role = carried or ("g" if is_backward and not is_cast else None)
        fmt, before = None, self.formats.get(source)
        if is_cast:
            fmt = reference.cast_format(func, arguments(func, args, kwargs), results[0])
            if before is not None and (fmt is None or reference.eps(before) > reference.eps(fmt)):
                fmt = before
        for t in results:
            if role is not None and not shares(t, inputs):
                self.roles.put(t, role)
            if fmt is not None:
                self.formats.put(t, fmt)

    def own(self, t: torch.Tensor, known: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        """The values of an operand before it was cast."""
        return _value(t, self.before.get(t), known)

    def of_step(
        self, t: torch.Tensor, known: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The values of an operand in the whole step in FP32."""
        values = self.total.get(t)
        if values is not None:
            return values
        if t.dtype in FLOATS and t.dtype.itemsize < 4 and self.before.packed(t) is None:
            self.made = max(self.made, torch.finfo(t.dtype).eps)
        return self.own(t, known)

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        results: list[torch.Tensor],
        is_listed: bool,
        started: list[torch.Tensor],
    ) -> Ran:
        written, is_cast = self._written, self._is_cast(func, args, result)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        protects, ids = func.overloadpacket in reference.WRITES_MORE, self._ids
        differs = any(self.total.packed(t) is not None for t in inputs)
        before = {id(t): kept for t, kept in zip(written, started, strict=False)}

        def compute(value: reference.Value, packed: reference.Packed) -> reference.Results:
            def safe(t: torch.Tensor, known: Any = None) -> torch.Tensor:
                found = value(t, known)
                return found.clone() if protects or (found is t and id(t) in ids) else found

            return reference.results(func, args, kwargs, result, safe, packed)

        def again(value: reference.Value) -> reference.Results:
            def unwritten(t: torch.Tensor, known: Any = None) -> torch.Tensor:
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
            targets = results if results and not written else written
            if is_listed or (not written and (is_cast or not differs)):
                own = again(self.own)
            total = compute(self.of_step, self.total.packed) if differs or written else own
        self._keep(targets, own, total, is_cast, bool(written))
        return Ran(own, total, again)

    def _is_cast(self, func: Any, args: Any, result: torch.Tensor) -> bool:
        """To fewer bits, or of what has been cast to fewer bits."""
        if func not in reference.TORCHS_CASTS:
            return reference.is_cast(func)
        source: torch.Tensor = args[1] if func is reference.COPY else args[0]
        narrows = source.is_floating_point() and result.dtype.itemsize < source.dtype.itemsize
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
                _put(self.total, t, value)
        if not is_cast:
            for t in targets if in_place else ():
                self.before.drop(t)
            return
        for t, value in zip(targets, own, strict=False):
            if value is not None:
                _put(self.before, t, value)

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


def _put(values: Values, t: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape == t.shape:
        values.put(t, value)
    elif value.numel():
        values.put_packed(t, value)


def _value(
    t: torch.Tensor, values: torch.Tensor | None, known: Callable[[], torch.Tensor] | None
) -> torch.Tensor:
    if values is not None:
        return values
    if known is not None:
        return known()
    return widened(t) if t.dtype in FLOATS else t


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that func writes to, as its schema has it."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    tensors: list[torch.Tensor] = []
    given = arguments(func, args, kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = tree_leaves(given[argument.name])
            tensors += (t for t in leaves if isinstance(t, torch.Tensor))
    return tensors


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
            flat = _storage_values(t) if t.numel() < size else values.new_empty(size)
            flat.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(values)
        self._hold(t, flat, False)

    def put_packed(self, t: torch.Tensor, values: torch.Tensor) -> None:
        self._hold(t, values.reshape(-1), True)

    def start(self, t: torch.Tensor) -> torch.Tensor:
        """The values of t, from now on its own."""
        values = self.get(t)
        if values is None:
            self._hold(t, _storage_values(t), False)
            values = self.get(t)
            assert values is not None
        return values

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


def _storage_values(t: torch.Tensor) -> torch.Tensor:
    """A copy of all that t's storage has."""
    flat = t.detach().as_strided((_elements(t),), (1,), 0)
    return flat.clone() if flat.dtype.itemsize >= 4 else flat.float()
