"""The shadow of a step: what each op would have returned in FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...recipes import Recipe
from . import exact
from .ops import Listed, arguments
from .trace import Trace
from .values import FLOATS, Marks, Values, is_float, shares, widened

_OF_LAYERS = ("product", "convolution")
_SWEEP = 32  # ops between two searches for storages that are no more


class Ran:
    """Of an op that has run, in FP32: what it returns of `inputs`, its own operands as they were
    before they were cast for it, and, if they are others, of those of the whole step in FP32.
    again: computes it of other values of the operands."""

    def __init__(
        self,
        own: exact.Results,
        whole: exact.Results,
        again: Callable[[exact.Value], exact.Results],
    ) -> None:
        self.own, self.whole, self.again = own, whole, again


class Shadow:
    """Computes each op a second time in FP32, from what the ops before it would have returned.

    Random draws and the choices of topk, sort and max follow the step. not_followed: how often an
    op could not be computed again: from there the shadow has what the step has.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], what_if: Mapping[str, Recipe] | None = None
    ) -> None:
        self.what_if = what_if or {}
        self.trace = Trace()
        self.made = 0.0  # the spacing at 1 of weights and inputs that were made in few bits
        self.formats: Marks[exact.Cast] = Marks()  # of casts, the coarsest one
        self.roles: Marks[str] = Marks()  # "w" of parameters, "g" of what backward returns
        for p in params:
            self.roles.put(p, "w")
        self.whole = Values()  # of a step in FP32
        self.before = Values()  # of results of casts: what was cast
        self.not_followed: Counter[str] = Counter()
        self._since_sweep = 0
        self._written: list[torch.Tensor] = []
        self._ids: set[int] = set()  # of all that the op writes to
        self._started: list[torch.Tensor] = []

    def clear(self) -> None:
        """A step has changed the weights."""
        self.whole.clear()
        self.before.clear()

    def prepare(self, func: Any, args: Any, kwargs: Any, listed: Listed | None) -> None:
        """Before func runs: keep what it is going to overwrite."""
        written = [] if exact.moves(func) else _written(func, args, kwargs)
        self._ids = {id(t) for t in written}
        self._written = [t for t in written if is_float(t)]
        self._started = []
        leaves = tree_leaves((args, kwargs))
        if not self._written or _is_strange(leaves) or not self._is_affected(leaves):
            return
        if listed is not None:  # its own error is that of the product and the sum
            self._started = [widened(t).clone() for t in self._written]
        if func not in exact.TORCHS_CASTS:
            for t in self._written:
                self.whole.start(t)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any, listed: Any) -> Ran | None:
        """After func has run. None: nothing that it had or returned is rounded, or it is not known
        what it computes."""
        self._since_sweep += 1
        if self._since_sweep >= _SWEEP:
            self._since_sweep = 0
            self.whole.sweep()
            self.before.sweep()
            self.roles.sweep()
            self.formats.sweep()
        if func.is_view or exact.moves(func):
            return None
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        written, started = self._written, self._started
        affected = self._is_affected(inputs + results) or (
            exact.has_codes(func)
            or (bool(self.what_if) and listed is not None and listed.kind in _OF_LAYERS)
        )
        if not exact.is_known(func) or not inputs or not affected:
            self._take(written)
            return None
        if not written and results and shares(results[0], inputs):
            return None  # a view whose schema does not say so
        if exact.is_random(func, arguments(func, args, kwargs)):
            if listed is not None or exact.is_drawn_from(func):
                self.not_followed[func.name()] += 1
            self._take(written)
            return None
        if exact.is_opaque(func) or _is_strange(inputs + results):
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
        is_cast = exact.is_cast(func) and len(inputs) > 0
        source = results[0] if not inputs else inputs[1] if func is exact.COPY else inputs[0]
        carried = self.roles.get(source) if is_cast or func in exact.PARTS else None
        role = carried or ("g" if is_backward and not is_cast else None)
        fmt, before = None, self.formats.get(source)
        if is_cast:
            fmt = exact.cast_format(func, arguments(func, args, kwargs), results[0])
            if before is not None and (fmt is None or exact.eps(before) > exact.eps(fmt)):
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
        found = self.whole.get(t)
        if found is not None:
            return found
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
        protects, ids = func.overloadpacket in exact.WRITES_MORE, self._ids
        differs = any(self.whole.packed(t) is not None for t in inputs)
        before = {id(t): kept for t, kept in zip(written, started, strict=False)}

        def compute(value: exact.Value, packed: exact.Packed) -> exact.Results:
            def safe(t: torch.Tensor, known: Any = None) -> torch.Tensor:
                found = value(t, known)
                return found.clone() if protects or (found is t and id(t) in ids) else found

            return exact.results(func, args, kwargs, result, safe, packed)

        def again(value: exact.Value) -> exact.Results:
            def unwritten(t: torch.Tensor, known: Any = None) -> torch.Tensor:
                kept = before.get(id(t))
                return value(t, known) if kept is None else kept.clone()

            return compute(unwritten, self.before.packed)

        own: exact.Results = []
        whole: exact.Results
        if func is exact.COPY:
            source, shape = args[1], args[0].shape
            own = [self.own(source).expand(shape).clone()]
            whole = [self.of_step(source).expand(shape).clone()]
            targets = [args[0]]
        else:
            targets = results if results and not written else written
            if is_listed or (not written and (is_cast or not differs)):
                own = again(self.own)
            whole = compute(self.of_step, self.whole.packed) if differs or written else own
        self._keep(targets, own, whole, is_cast, bool(written))
        return Ran(own, whole, again)

    def _is_cast(self, func: Any, args: Any, result: torch.Tensor) -> bool:
        """To fewer bits, or of what has been cast to fewer bits."""
        if func not in exact.TORCHS_CASTS:
            return exact.is_cast(func)
        source: torch.Tensor = args[1] if func is exact.COPY else args[0]
        narrows = source.is_floating_point() and result.dtype.itemsize < source.dtype.itemsize
        return narrows or self.before.packed(source) is not None

    def _keep(
        self,
        targets: list[torch.Tensor],
        own: exact.Results,
        whole: exact.Results,
        is_cast: bool,
        in_place: bool,
    ) -> None:
        for t, value in zip(targets, whole, strict=False):
            there = self.whole.get(t) if in_place else None
            if value is not None and not (there is not None and value.is_set_to(there)):
                _put(self.whole, t, value)
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
                if self.whole.packed(t) is not None or self.before.packed(t) is not None:
                    return True
        return False

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        """The shadow of these is what they are."""
        for t in tensors:
            if is_float(t) and self.whole.get(t) is not None:
                self.whole.put(t, widened(t))
            elif self.whole.packed(t) is not None:
                self.whole.drop(t)
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
    t: torch.Tensor, found: torch.Tensor | None, known: Callable[[], torch.Tensor] | None
) -> torch.Tensor:
    if found is not None:
        return found
    if known is not None:
        return known()
    return widened(t) if t.dtype in FLOATS else t


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that func writes to, as its schema has it."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    given = arguments(func, args, kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = tree_leaves(given[argument.name])
            found += (t for t in leaves if isinstance(t, torch.Tensor))
    return found
