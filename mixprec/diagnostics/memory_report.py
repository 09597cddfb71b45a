"""memory_report: the bytes that a training step keeps, by what they are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..memory.compress_saved import recorded
from ..memory.packed import Parts, Saved
from ..optim._release import is_released, other_hooks
from .passes import restored, scalar_loss, tensors
from .writers import aligned, readable

# What an optimizer of mixprec may hold before its first step.
_MASTERS = {"master", "remainder"}
KINDS = ("linear", "attention", "activation", "norm", "loss", "other")


@dataclass
class MemoryReport:
    """What `memory_report` measured, in bytes. str() is its table; a row per part.

    states: of the optimizer, by their key ("exp_avg", "master"); saved: for backward, by the kind
    of op that saves them, where compressed as they are kept; peak: the most that the device had
    allocated, or the process resident, during the forward and backward pass, None if unknown;
    start: the same when they begin.
    """

    label: str
    parameters: int
    gradients: int
    states: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    peak: int | None = None
    start: int | None = None

    def rows(self) -> dict[str, int]:
        """The parts, without the peak, by their name in the table."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            **{f"optimizer: {key}": n for key, n in self.states.items()},
            **{f"saved: {kind}": n for kind, n in self.saved.items()},
        }

    @property
    def saved_total(self) -> int:
        return sum(self.saved.values())

    @property
    def total(self) -> int:
        return sum(self.rows().values())

    def table(self, *others: MemoryReport) -> str:
        """This report, and others beside it, such as those of the same model in other settings."""
        return "\n".join(aligned(self.cells(*others)))

    def cells(self, *others: MemoryReport) -> list[list[str]]:
        """The lines of `table`, the heading first."""
        reports = (self, *others)
        names = _row_names(reports)
        lines = [["", *(report.label or "bytes" for report in reports)]]
        lines += [[n, *(readable(report.rows().get(n)) for report in reports)] for n in names]
        columns = [report._summary() for report in reports]
        lines += [[n, *(readable(column[n]) for column in columns)] for n in columns[0]]
        return [line for line in lines if set(line[1:]) != {"-"}]  # nothing that was not measured

    def _summary(self) -> dict[str, int | None]:
        unknown = self.peak is None or self.start is None
        return {
            "saved, all": self.saved_total if self.saved else None,
            "total": self.total,
            "peak": self.peak,
            "peak above the start": None if unknown else self.peak - self.start,  # type: ignore[operator]
        }

    def __str__(self) -> str:
        return self.table()


def _row_names(reports: Iterable[MemoryReport]) -> list[str]:
    """The parts of any of the reports: parameters, gradients, states, saved."""
    names = dict.fromkeys(name for report in reports for name in report.rows())
    return sorted(names, key=lambda name: name.startswith("saved"))  # the sort is stable


def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    label: str = "",
) -> MemoryReport:
    """Measure what a training step of `model` keeps, by one forward and backward pass.

        before = mixprec.memory_report(model, optimizer, batch, label="plain")
        mixprec.convert(model, "bf16", saved="int8")
        print(before.table(mixprec.memory_report(model, optimizer, batch, label="int8")))

    batch: the arguments of model as a tuple or list, as a dict (or another mapping) of keyword
    arguments, or one tensor. loss(output) returns the scalar to differentiate; None: it is the
    output, or output.loss or output["loss"]. label: the heading of the report's column.

    Each storage counts once; what the model holds itself (parameters, buffers) and the batch do not
    count as saved. The states are all tensors in optimizer.state, of any optimizer; before its
    first step, those of a copy of it, with a copy of the parameters, after one step. Of DTensors,
    the local part counts. With release_gradients=True the gradients are the most that exist at a
    time, and nothing is updated.

    Optimizer, gradients and random generators are left as they were, and so is the model: buffers,
    which a forward pass may change, replace, add or delete, and all other attributes of its
    modules. Not undone is what its forward pass does to parameters, and to Python objects that an
    attribute keeps (such as a list that it appends to). ValueError if the loss is not one number.
    """
    params = list(model.parameters())
    if any(other_hooks(p, optimizer) for p in params):
        raise ValueError(
            "memory_report: the model's parameters must have no hooks for their gradients "
            "(register_post_accumulate_grad_hook), such as an optimizer's that steps in backward"
        )
    device = next((p.device for p in params), torch.device("cpu"))
    saved = SavedBytes([*params, *model.buffers(), *tensors(batch)])
    with restored(model), _peak(device) as (start, peak):
        with recorded(saved):
            remedy = "pass loss=, a function of the model's output"
            scalar = scalar_loss("memory_report", model, batch, loss, remedy)
        releases = getattr(optimizer, "_releases", None)
        live = None if releases is None else LiveGradients(scalar)
        if releases is not None:
            releases.rehearses = True
        try:
            scalar.backward()
        finally:
            if releases is not None:
                releases.rehearses = False
        largest = peak()
        gradients = _bytes(
            g
            for p in params
            for g in (p.grad, getattr(p, "main_grad", None))
            if g is not None and not is_released(g)
        )
        gradients += 0 if live is None else live.largest
        updated = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        has_stepped = all(set(optimizer.state.get(p, ())) - _MASTERS for p in updated)
        states = _state_bytes(optimizer if has_stepped else _stepped(optimizer))
    kinds = {kind: saved[kind] for kind in KINDS if saved.get(kind)}
    return MemoryReport(label, _bytes(params), gradients, states, kinds, largest, start)


class LiveGradients:
    """Measures, from the nodes of a loss, what waits for `grad` to be complete: `largest`, in
    bytes. The gradient of a parameter exists from the first node that computes a part of it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.largest = 0
        self._live: dict[Any, int] = {}
        seen: set[Any] = {None}
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [edge for edge, _ in node.next_functions]
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


def _bytes(values: Iterable[torch.Tensor]) -> int:
    """Each storage once."""
    storages = [t.untyped_storage() for t in tensors([*values])]
    return sum({StorageWeakRef(storage): storage.nbytes() for storage in storages}.values())


class SavedBytes(dict[str, int]):
    """What is saved for backward by kind, each storage once and without those `owned`: a function
    for `recorded`."""

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._storages = {StorageWeakRef(t.untyped_storage()) for t in tensors([*owned])}
        self._parts: WeakSet[Parts] = WeakSet()  # not kept until after the backward pass

    def __call__(self, kind: str, kept: torch.Tensor | Saved) -> None:
        size = 0
        if isinstance(kept, Saved):
            size = 0 if kept.parts in self._parts else kept.parts.nbytes
            self._parts.add(kept.parts)
        else:
            for local in tensors(kept):
                storage = local.untyped_storage()
                reference = StorageWeakRef(storage)
                size += 0 if reference in self._storages else storage.nbytes()
                self._storages.add(reference)
        self[kind] = self.get(kind, 0) + size


def _state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    by_key: dict[str, list[torch.Tensor]] = {}
    for param, state in optimizer.state.items():
        entries = state if isinstance(param, torch.Tensor) else {param: state}
        for key, value in entries.items():
            by_key.setdefault(str(key), []).extend(tensors(value))
    return {key: size for key, kept in by_key.items() if (size := _bytes(kept))}


def _stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy, without its hooks, after a step with the gradients that its parameters have."""
    twin = copy.deepcopy(optimizer)
    for mine, its in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, q in zip(mine["params"], its["params"], strict=True):
            if is_released(p.grad):
                q.grad = torch.zeros_like(q, dtype=p.grad.dtype)
            else:
                q.grad = None if p.grad is None else p.grad.clone()
    twin._optimizer_step_pre_hooks.clear()
    twin._optimizer_step_post_hooks.clear()
    type(twin).step(twin)  # a scheduler's wrapper in optimizer.step would step the original
    return twin


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[tuple[int | None, Callable[[], int | None]]]:
    """The memory in use now, and a function that returns the most since then."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield torch.cuda.memory_allocated(device), lambda: torch.cuda.max_memory_allocated(device)
        return
    try:  # Linux: 5 resets the largest resident size
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        yield None, lambda: None
    else:
        start = _resident("VmRSS")
        # Linux counts the pages of each thread apart, and the sum may be some pages behind.
        yield start, lambda: max(start, _resident("VmHWM"))


def _resident(field: str) -> int:
    """A size of the process as Linux has it: VmRSS, or VmHWM, the largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
