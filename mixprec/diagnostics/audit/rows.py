"""The rows that each op of a pass takes and returns, and the first op that returns others than in
another pass.

A row lies along the last dimension. In whatever order, number and shape two passes compute the rows
of a text, the same rows are there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._modes import nor_below
from . import modes, ops
from .ops import Call, Listed
from .provenance import Owners

_DRAWS = torch.Tag.nondeterministic_seeded
_CASTS = ("quantize", "act_quantize", "norm_quantize", "amax")
_FILLS = ("empty", "new_empty", "arange", "full", "zeros", "ones", "scalar_tensor")
Key = tuple[str, str, int, torch.dtype, int]  # module, op, elements of a row, dtype, which tensor
Numbers = dict[Key, torch.Tensor]
Shapes = list[tuple[int, ...]]


class Event(NamedTuple):
    """An op that has run, with the numbers of the rows of its operands and results."""

    where: str
    op: str
    func: Any
    listed: Listed | None
    shapes: Shapes
    operands: Numbers
    results: Numbers

    def said(self, wrong: list[Key], other: Shapes) -> str:
        is_one = any(key[2] <= 1 for key in wrong)
        if self.op.startswith(_CASTS) and (is_one or any(key[4] > 0 for key in wrong)):
            why = "a scale over other rows"
        elif self.listed is not None and self.listed.kind != "reduction":
            why = "it sums in another order"
        elif _DRAWS in self.func.tags:
            why = "it draws at random"
        elif self.listed is not None or is_one:
            why = "a sum or maximum over other rows, or in another order"
        else:
            why = "its kernel computes an element by its place in the tensor"
        here, there = (" ".join(map(str, shapes[:3])) for shapes in (self.shapes, other))
        return f"{self.where}, {self.op}: {why} (operands {here} here, {there} there)"


@functools.cache
def _factors(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) | 1


def _hashes(t: torch.Tensor) -> torch.Tensor:
    """A number for the bits of each row that is not 0."""
    rows = t.detach().reshape(-1, t.shape[-1] if t.dim() else 1)
    rows = rows.clone(memory_format=torch.contiguous_format)  # a size of 1 may have any stride
    codes = rows.view(torch.uint8).view(rows.shape[0], -1).long().cpu()
    numbers = (codes * _factors(codes.shape[1])).sum(1)
    return numbers[numbers != 0].unique()


class Rows(TorchDispatchMode):
    """A mode that notes each op in `events`. Compiled code runs uncompiled in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._owners, self._patched = Owners(model), modes.torch_patched()
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def __enter__(self) -> Any:
        self._patched.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patched.__exit__(*error)

    @nor_below
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if func.is_view or call.op.startswith(_FILLS):
            call.run()
            return call.result
        where = self._owners.find().where or "the model"
        operands = self._numbers(where, call.op, call.inputs)
        call.run()
        results = self._numbers(where, call.op, call.results or call.inputs[:1])
        shapes = [ops.shape(t) for t in call.inputs]
        self.events.append(Event(where, call.op, func, call.listed, shapes, operands, results))
        return call.result

    def _numbers(self, where: str, op: str, tensors: Iterable[torch.Tensor]) -> Numbers:
        return {
            (where, op, t.shape[-1] if t.dim() else 0, t.dtype, i): _hashes(t)
            for i, t in enumerate(tensors)
            if (t.is_floating_point() or t.dtype == torch.uint8)
            and t.numel()
            and t.untyped_storage()._cdata not in self._weights
        }


def first_difference(checked: Rows, among: Rows) -> str:
    """The first op of `checked` that returns, of operands which it has in `among` too, rows that it
    does not have there; and why."""
    returned: dict[Key, list[torch.Tensor]] = defaultdict(list)
    taken: dict[Key, list[torch.Tensor]] = defaultdict(list)
    shapes: dict[tuple[str, str], Shapes] = {}
    for event in among.events:
        shapes.setdefault((event.where, event.op), event.shapes)
        for numbers, there in ((event.results, returned), (event.operands, taken)):
            for key, hashes in numbers.items():
                there[key].append(hashes)
    only_here = ""
    for event in checked.events:
        if (event.where, event.op) not in shapes:
            only_here = f"{event.where}, {event.op}: another kernel, which the other pass lacks"
        elif wrong := _missing(event.results, returned):
            # (What a random op fills had other values.)
            is_filled = _DRAWS in event.func.tags and event.op.endswith("_")
            if is_filled or not _missing(event.operands, taken):
                return event.said(wrong, shapes[event.where, event.op])
            unseen = "its operands differ, for a reason that no op shows"
            return only_here or f"{event.where}, {event.op}: {unseen}"
    return only_here or "not reproduced: op by op, both passes have the same rows"


def _missing(numbers: Numbers, there: dict[Key, list[torch.Tensor]]) -> list[Key]:
    """Those with a row that is not there, where there are rows of this size."""
    known = ((key, rows, torch.cat(there[key])) for key, rows in numbers.items() if key in there)
    return [key for key, rows, others in known if not bool(torch.isin(rows, others).all())]
