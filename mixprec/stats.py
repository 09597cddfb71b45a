"""Statistics of the casts of a model: amax, scale, overflow, underflow and SQNR, sampled.

`Monitor` watches a model while it trains.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ._local_gradients import is_sharded
from .amp.rules import power
from .diagnostics import measure
from .diagnostics.layers import (
    as_operand,
    first,
    measured_layers,
    product_fp32,
    recipe_layers,
    say_what_is_left_out,
    state_here,
)
from .diagnostics.measure import FIELDS
from .diagnostics.writers import SHORT, Record, aligned, decibels, finite, layer_name
from .ops._dispatch import autocast, checks

__all__ = ["Monitor"]

_NAME = 24  # columns of the table for a layer's name; 80 in all
# Of the sums of a tensor: step, layer, tensor, format, granularity; of a number: step, name.
Key = tuple[Any, ...]


_attached: weakref.WeakSet[Monitor] = weakref.WeakSet()


def is_sampling() -> bool:
    """Whether a Monitor measures the current step."""
    return any(monitor._sampling for monitor in list(_attached))


class Monitor:
    """Statistics of every tensor that is cast, at every `every`-th step of training.

        with mixprec.stats.Monitor(model, every=100, scaler=scaler) as monitor:
            for batch in batches:
                ...                      # forward, backward, optimizer step
                monitor.step()           # at the end of each training step
        print(monitor.table())

    model: its modules that have a `recipe` (`mixprec.convert`) are watched. Steps 0, every,
    2 * every, ... are sampled. For x, w and g (the gradient of the output, loss scale included) of
    each layer: amax; the scale of the cast (the layer's with delayed scaling, else derived by the
    op; the smallest and the largest over rows or blocks); how many elements overflow (finite, and
    saturate in FP8 or become Inf in 16 bits), underflow (nonzero, and become 0), are Inf, are NaN.
    For the output y: amax, Inf and NaN. x and w are measured as cast for the forward GEMM, g as
    cast for the grad_input GEMM. sqnr=True adds the SQNR of each cast, and of y against torch's
    product in FP32, with how much of y overflows and underflows, at the cost of one FP32 product
    per layer. scaler: its loss scale and skipped steps are recorded; optimizer: for a scaler that
    does not count them (torch's), or none, skipped steps are those missing in its `step` counts.
    Several calls in one step (micro-batches, a layer used twice) are merged: largest amax, summed
    counts.

    There is no host sync until `flush`, which transfers everything at once, and the model's results
    do not change. In other steps a hook is one Python comparison. Not measured: passes without grad
    mode, forward passes repeated by activation checkpointing (each counts once), code compiled by
    torch.compile or replayed by a CUDA graph, where the hooks do nothing (`graphed` runs the steps
    that are sampled without one), and the weights of a layer that FSDP shards by itself. `close`
    removes the hooks.

    The names in `to_logger` are "loss_scale", "skipped_steps", "amax/x/LAYER", "overflow/g/LAYER",
    and so on.

    TypeError if `model` is not a module; ValueError if it has no layer with a recipe or `every` is
    not an int of 1 or more.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        sqnr: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        checks.is_module("Monitor", model)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"Monitor: every must be an int of 1 or more, got {every!r}")
        if not any(True for _ in measured_layers(model)):
            raise ValueError("Monitor: model must have layers with a recipe: mixprec.convert it")
        say_what_is_left_out(model)
        self.model, self.every, self.sqnr = model, every, sqnr
        self.scaler, self.optimizer = scaler, optimizer
        self.steps = 0  # that ended
        self.records: list[Record] = []  # of each sampled step, after flush()
        self._written: dict[Any, int] = {}  # how many records a file or logger has
        self._samples: list[tuple[Key, torch.Tensor]] = []  # on their devices
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        if optimizer is not None:
            self._applied_before = _applied(optimizer)
        self._start_step()

    def attach(self) -> Monitor:
        """Register the hooks, as entering the context does; no effect if they are registered."""
        _attached.add(self)
        self._handles = self._handles or [
            layer.register_forward_hook(self._after_forward(name), with_kwargs=True)
            for name, layer in measured_layers(self.model)
        ]
        return self

    def close(self) -> None:
        """Remove the hooks, and flush."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _attached.discard(self)
        self._sampling = False
        self.flush()

    def __enter__(self) -> Monitor:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_step(self) -> None:
        self._sampling = self.steps % self.every == 0
        self._seen: set[str] = set()  # layers that were called outside of a backward pass
        self._loss_scale: torch.Tensor | None = None  # of the gradients of this step

    def step(self) -> None:
        """End a training step: after the optimizer's step and the scaler's update."""
        if self._sampling:
            self._end_sample()
        self.steps += 1
        self._start_step()

    @torch.no_grad()
    def _end_sample(self) -> None:
        self._note_loss_scale()
        if self._loss_scale is not None:
            self._note("loss_scale", self._loss_scale)
        skipped = getattr(self.scaler, "skipped", None)
        if isinstance(skipped, torch.Tensor):
            self._note("skipped_steps", skipped)
        elif self.optimizer is not None:
            taken = _applied(self.optimizer)
            before = self._applied_before.to(taken.device, non_blocking=True)
            self._note("skipped_steps", self.steps + 1 - (taken - before))
        for name, layer in recipe_layers(self.model):
            clipped = getattr(layer, "clipped", None)
            if isinstance(clipped, torch.Tensor):
                self._note(f"clipped/{name}", clipped.sum())
        # Records the step even if no layer was called.
        self._note("", torch.zeros((), device="cpu"))

    def _note(self, name: str, value: torch.Tensor) -> None:
        self._samples.append(((self.steps, name), value.detach().double().reshape(1)))

    def _note_loss_scale(self) -> None:
        scale = getattr(self.scaler, "_scale", None)
        if self._loss_scale is None and isinstance(scale, torch.Tensor):
            self._loss_scale = scale.clone()  # update() writes to it

    def _after_forward(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
            if torch.compiler.is_compiling() or not self._sampling:
                return
            if torch._C._are_functorch_transforms_active():
                return  # their tensors have no values outside
            x = first(args, kwargs)
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # a graph would write to the same place at every replay, unnoticed
            if torch.is_grad_enabled():
                self._measure(name, layer, x, y)

        return hook

    def _measure(self, name: str, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        state = state_here(layer)
        if state is None or not isinstance(y, torch.Tensor):
            return
        recipe, delayed = state
        step = self.steps

        def note(role: str, t: torch.Tensor) -> None:
            t = as_operand(layer, role, t.detach())
            if recipe.outliers and role != "g":  # whose products do not read this cast
                t = t.index_fill(-1, layer._outliers(), 0.0)  # type: ignore[operator]
            sums = measure.cast_sums(t, role, recipe, delayed, sqnr=self.sqnr)
            one = recipe.casts(role)[0]
            granularity, fmt = getattr(one, f"{role}_granularity"), getattr(one, role).name
            self._samples.append(((step, name, role, fmt, granularity), sums))

        def after_backward(g: torch.Tensor) -> None:
            if self._sampling and self.steps == step:
                self._note_loss_scale()
                with autocast.disabled(g.device.type):
                    note("g", g)

        if y.requires_grad:
            y.register_hook(after_backward)
        # A forward inside a backward pass is a recomputation; for a layer not yet called it is the
        # first with a graph (checkpoint with use_reentrant=True).
        if torch._C._current_graph_task_id() == -1:
            self._seen.add(name)
        elif name in self._seen:
            return
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        with torch.no_grad(), autocast.disabled(x.device.type):
            note("x", x)
            ref, has_weight = None, not is_sharded(weight)  # else known in the forward only
            if has_weight:
                note("w", weight)
            if self.sqnr and has_weight:
                bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
                ref = product_fp32(layer, x.detach(), weight, bias)
            fmt = str(y.dtype).removeprefix("torch.")
            key = step, name, "y", SHORT.get(fmt, fmt), ""
            self._samples.append((key, measure.output_sums(y, ref)))

    def flush(self) -> list[dict[str, Any]]:
        """Transfer the measurements since the last flush to the host at once, add them to
        `records`, and return these. The only method that waits for the device."""
        samples, self._samples = self._samples, []
        devices = (t.device for _, t in samples if t.device.type != "cpu")
        home = next(devices, torch.device("cpu"))
        with torch.no_grad():
            moved = [t.to(home, non_blocking=True) for _, t in samples]
            numbers = iter(torch.cat(moved).tolist() if moved else ())
        sizes = ((key, t.numel()) for key, t in samples)
        _add(self.records, [(key, [*itertools.islice(numbers, size)]) for key, size in sizes])
        return self.records

    def table(self, limit: int | None = None) -> str:
        """The newest sample that was flushed, as text of at most 100 columns: a line for each layer
        and tensor (at most `limit`), the worst first: Inf and NaN, then overflow, underflow and
        SQNR."""
        return _table(self.records[-1], limit) if self.records else "nothing was sampled"

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Append the records that were not written there yet, a line each, with None for NaN and
        Inf. All lines are written at once; a line truncated by a crash does not affect later
        ones."""
        key = os.path.abspath(path)
        records = self.records[self._written.get(key, 0) :]
        lines = [json.dumps(finite(record), allow_nan=False) + "\n" for record in records]
        if lines:
            with open(path, "ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    lines[0] = lines[0] if file.read(1) == b"\n" else "\n" + lines[0]
                file.write("".join(lines).encode())
        self._written[key] = len(self.records)

    def to_logger(self, logger: Any) -> None:
        """Give every number of `records` that `logger` does not have yet to it.

        logger: an object with add_scalar(tag, value, global_step), such as TensorBoard's
        SummaryWriter, which gets one call per number; or with log(dict, step=), such as a run of
        Weights & Biases or its module `wandb`, which gets one call per record. TypeError for
        another object.
        """
        add = getattr(logger, "add_scalar", None)
        log = getattr(logger, "log", None)
        if isinstance(logger, logging.Logger) or not (callable(add) or callable(log)):
            raise TypeError(
                "Monitor: logger must have add_scalar(tag, value, global_step), as "
                "TensorBoard's SummaryWriter, or log(dict, step=), as a run of Weights & Biases, "
                f"got {type(logger).__name__}"
            )
        for record in self.records[self._written.get(logger, 0) :]:
            numbers, step = dict(_numbers(record)), record["step"]
            if not callable(add):
                logger.log(numbers, step=step)
                continue
            for tag, value in numbers.items():
                add(tag, value, step)
        self._written[logger] = len(self.records)


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in a record."""
    for name in ("loss_scale", "skipped_steps"):
        if record[name] is not None:
            yield name, record[name]
    for layer, count in record["clipped"].items():
        yield f"clipped/{layer}", count
    for row in record["tensors"]:
        for name in ("amax", "scale_min", "scale_max", "overflow", "underflow", "sqnr"):
            if row[name] is not None:
                yield f"{name}/{row['tensor']}/{row['layer']}", row[name]
        yield f"not_finite/{row['tensor']}/{row['layer']}", row["inf"] + row["nan"]


def _applied(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """How many steps the optimizer took: the largest `step` of its params, on their device."""
    states = (s for p, s in optimizer.state.items() if isinstance(p, torch.Tensor))
    counts = [torch.as_tensor(s["step"]) for s in states if "step" in s]
    if not counts:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    home = counts[0].device
    wide = [c.detach().double().reshape(()).to(home, non_blocking=True) for c in counts]
    return torch.stack(wide).max()


def _add(records: list[Record], samples: Sequence[tuple[Key, list[float]]]) -> None:
    """Append one record for each step that ended; tensors of a step that has a record join it."""
    by_step = {record["step"]: record for record in records[-1:]}
    merged: dict[Key, tuple[int, list[float]]] = {}
    for key, values in samples:
        step, name = key[:2]
        if step not in by_step:
            by_step[step] = {"step": step, "loss_scale": None, "skipped_steps": None, "clipped": {}}
            by_step[step]["tensors"] = []
            records.append(by_step[step])
        if len(key) == 5:
            calls, before = merged.get(key, (0, []))
            merged[key] = calls + 1, _merge(before, values) if calls else values
        elif name.startswith("clipped/"):
            by_step[step]["clipped"][name.removeprefix("clipped/")] = int(values[0])
        elif name:
            by_step[step][name] = int(values[0]) if name == "skipped_steps" else values[0]
    for key, (calls, values) in merged.items():
        by_step[key[0]]["tensors"].append(_tensor(key, calls, values))


def _merge(a: Sequence[float], b: Sequence[float]) -> list[float]:
    merged = [x + y for x, y in zip(a, b, strict=True)]
    amax, low, high = (FIELDS.index(name) for name in ("amax", "scale_min", "scale_max"))
    nan = math.isnan(a[amax]) or math.isnan(b[amax])
    merged[amax] = math.nan if nan else max(a[amax], b[amax])
    merged[low], merged[high] = min(a[low], b[low]), max(a[high], b[high])
    return merged


def _tensor(key: Key, calls: int, values: Sequence[float]) -> Record:
    record: Record = dict(zip(("layer", "tensor", "format", "granularity"), key[1:], strict=True))
    record |= {
        "granularity": key[4] or None,
        "calls": calls,
        **dict(zip(FIELDS, values, strict=True)),
    }
    signal, noise, elements = (record.pop("signal"), record.pop("noise"), record["elements"])
    is_measured = not math.isnan(record["overflow"]) or key[2] != "y"
    for name in ("overflow", "underflow"):
        unknown = math.isnan(record[name]) or not elements
        record[name] = None if unknown else record[name] / elements
    record |= {name: int(record[name]) for name in ("elements", "inf", "nan")}
    return record | {"sqnr": measure.sqnr(signal, noise) if is_measured else None}


def _badness(row: Record) -> tuple[float, ...]:
    """Larger is worse: Inf and NaN, then overflow, underflow, and a low SQNR."""
    sqnr = row["sqnr"]
    lost = -math.inf if sqnr is None else math.inf if math.isnan(sqnr) else -sqnr
    wrong = row["inf"] + row["nan"]
    return (wrong / max(1, row["elements"]), row["overflow"] or 0.0, row["underflow"] or 0.0, lost)


def _table(record: Record, limit: int | None) -> str:
    """One record as text: a line for the step, then a line for each tensor, the worst first."""
    parts = [f"step {record['step']}"]
    if record["loss_scale"] is not None:
        parts.append(f"loss scale {power(record['loss_scale'])}")
    if record["skipped_steps"] is not None:
        parts.append(f"{record['skipped_steps']} steps skipped")
    if clipped := sum(record["clipped"].values()):
        parts.append(f"{clipped:,} activations clipped")
    rows = sorted(record["tensors"], key=_badness, reverse=True)
    header = ("layer", "cast", "amax", "scale", "over", "under", "inf/nan", "SQNR")
    cells = [header, *(tuple(_cells(row)) for row in rows[:limit])]
    if not any(row["sqnr"] is not None and math.isfinite(row["sqnr"]) for row in rows):
        cells = [line[:-1] for line in cells]
    lines = [", ".join(parts), *aligned(cells, left=(0, 1))]
    if limit is not None and len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more")
    return "\n".join(lines)


def _cells(row: Record) -> Iterator[str]:
    yield layer_name(row["layer"], _NAME)
    yield f"{row['tensor']} {row['format']}"
    yield f"{row['amax']:.3g}"
    low, high = power(row["scale_min"]), power(row["scale_max"])
    yield low if low == high else f"{low}..{high}"
    for share in (row["overflow"], row["underflow"]):
        if not share:
            yield "-" if share is None else "0"
        else:
            yield f"{share:.2%}" if share >= 1e-4 else f"{100 * share:.1g}%"
    yield "/".join(f"{row[n]:.3g}" for n in ("inf", "nan")) if row["inf"] or row["nan"] else "0"
    yield decibels(row["sqnr"])
