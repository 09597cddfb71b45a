"""The rows that each op of a pass takes and returns, and the first op of another pass that returns
rows which are not among them.

A row is what lies along the last dimension of a tensor. Whatever the order, the number and the
shape in which two passes compute the rows of a text, the same rows are there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._modes import nor_below
from . import modes, ops
from .ops import Call
from .provenance import Owners

_SCALED = ("quantize", "act_quantize", "norm_quantize", "amax", "quantize_mx")
_FILLS = ("empty", "new_empty", "rand", "arange", "full", "zeros", "ones", "scalar_tensor")
_DRAWS = torch.Tag.nondeterministic_seeded
Key = tuple[str, str, int, torch.dtype, int]  # module, op, elements of a row, dtype, which result


class Event(NamedTuple):
    """An op that has run: the rows of its operands and results, by key."""

    where: str
    call: Call
    shapes: tuple[tuple[int, ...], ...]
    operands: dict[Key, torch.Tensor]
    results: dict[Key, torch.Tensor]


@functools.cache
def _factors(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) | 1


def hashes(t: torch.Tensor) -> torch.Tensor:
    """A number for the bits of each row; none of rows that are 0."""
    rows = t.detach().reshape(-1, t.shape[-1] if t.dim() else 1)
    bits = rows.contiguous().view(torch.uint8).view(rows.shape[0], -1).long().cpu()
    numbers = (bits * _factors(bits.shape[1])).sum(1)
    return numbers[numbers != 0].unique()


class Rows(TorchDispatchMode):
    """A mode that notes the rows of each op in `events`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._owners = Owners(model)
        self._known = {p.untyped_storage()._cdata for p in model.parameters()}

    def __enter__(self) -> Any:
        self._patched = modes.torch_patched()
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
        owner = self._owners.find()
        where = owner.where or "the model"
        operands = self._rows(where, call.op, call.inputs)
        call.run()
        results = self._rows(where, call.op, call.results or call.inputs[:1])
        if results:
            shapes = tuple(map(ops.shape, call.inputs))
            self.events.append(Event(where, call, shapes, operands, results))
        call.args, call.kwargs, call.inputs, call.results = (), {}, [], []
        result, call.result = call.result, None
        return result

    def _rows(self, where: str, op: str, tensors: list[torch.Tensor]) -> dict[Key, torch.Tensor]:
        rows = {}
        for i, t in enumerate(tensors):
            is_value = t.is_floating_point() or t.dtype == torch.uint8
            if is_value and t.numel() and t.untyped_storage()._cdata not in self._known:
                rows[where, op, t.shape[-1] if t.dim() else 0, t.dtype, i] = hashes(t)
        return rows


def first_difference(checked: Rows, among: Rows) -> str:
    """The first op of `checked` that returns, of operands that `among` has too, rows that it has
    not; and why."""
    there: dict[Key, list[torch.Tensor]] = defaultdict(list)
    taken: dict[Key, list[torch.Tensor]] = defaultdict(list)
    shapes: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {}
    for event in among.events:
        shapes.setdefault((event.where, event.call.op), event.shapes)
        for rows, all_rows in ((event.results, there), (event.operands, taken)):
            for key, numbers in rows.items():
                all_rows[key].append(numbers)
    alone: Event | None = None  # the last one whose op the other pass does not have
    for event in checked.events:
        if (event.where, event.call.op) not in shapes:
            alone = event
            continue
        wrong = [key for key, rows in event.results.items() if not _are_in(rows, there.get(key))]
        if not wrong:
            continue
        fills = _DRAWS in event.call.func.tags and event.call.op.endswith(
            "_"
        )  # what was there before
        operands = {} if fills else event.operands
        if all(_are_in(rows, taken.get(key)) for key, rows in operands.items()):
            return _said(event, wrong, shapes[event.where, event.call.op])
        if alone is not None:
            has = sorted({op for where, op in shapes if where == alone.where})
            return (
                f"{alone.where}, {alone.call.op}: another kernel: the other pass has there "
                f"{', '.join(has[:8]) or 'no op'}"
            )
        return f"{event.where}, {event.call.op}: its operands differ, by an op that is not seen"
    return "not seen op by op: the kernels of the watched passes return the same rows"


def _are_in(rows: torch.Tensor, others: list[torch.Tensor] | None) -> bool:
    """Whether all of them are among the others; also where there are none of this size."""
    return others is None or bool(torch.isin(rows, torch.cat(others)).all())


def _said(event: Event, wrong: list[Key], other: tuple[tuple[int, ...], ...]) -> str:
    call = event.call
    sizes = f"operands {_shapes(event.shapes)} here, {_shapes(other)} there"
    if call.op.startswith(_SCALED) and any(key[2] <= 1 or key[4] > 0 for key in wrong):
        why = "a scale over other rows"
    elif call.listed is not None and call.listed.kind != "reduction":
        why = "it sums in another order"
    elif _DRAWS in call.func.tags:
        why = "it draws at random"
    elif call.listed is not None or any(key[2] <= 1 for key in wrong):
        why = "a sum or maximum over other rows, or in another order"
    else:
        why = "its kernel computes an element by its place in the tensor"
    return f"{event.where}, {call.op}: {why} ({sizes})"


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " ".join(str(list(shape)).replace(" ", "") for shape in shapes[:3])
