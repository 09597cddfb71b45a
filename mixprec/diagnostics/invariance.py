"""invariance: whether a model computes the same bits for a token whatever is beside it, and the
first operation that does not."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .audit.rows import Rows, first_difference
from .passes import call, map_tensors, restored, tensors
from .writers import aligned

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
_PADDING = 5  # columns, no multiple of a vector


@dataclass
class Case:
    """name: how the model was run; gap: the largest difference of an element of its output from
    that of the whole batch, 0 for equal bits, None where it was not run; said: the first operation
    that differs and why, or why it was not run."""

    name: str
    gap: float | None
    said: str = ""

    @property
    def agrees(self) -> bool:
        return self.gap == 0


class Invariance(list[Case]):
    """The cases of `invariance`. str() is a table."""

    @property
    def holds(self) -> bool:
        """Whether the bits agree in each case that was run."""
        return all(case.gap in (0, None) for case in self)

    def __str__(self) -> str:
        lines = [["case", "gap", "first difference"]]
        for case in self:
            gap = "not run" if case.gap is None else f"{case.gap:.2g}" if case.gap else "same bits"
            lines.append([case.name, gap, case.said or "-"])
        return "\n".join(aligned(lines, left=(0, 2)))


class _Runs:
    """The passes of a model over a batch and parts of it. `whole` is the output of all of it."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model, self.batch, self.whole, self.passes = model, batch, torch.empty(0), 0
        first = next(t for t in tensors(batch) if t.dim() > 0)
        self.size = first.shape[0]
        self.mask: torch.Tensor | None = None  # [B, T] of text: True for a token
        if isinstance(batch, Mapping) and "input_ids" in batch:
            ids = batch["input_ids"]
            given = batch.get("attention_mask")
            self.mask = torch.ones_like(ids) if given is None else given.to(ids.dtype)
            places = (self.mask.cumsum(1) - 1).clamp_min(0)
            takes = inspect.signature(model.forward).parameters
            made = {"attention_mask": self.mask, "position_ids": places}
            made = {name: t for name, t in made.items() if name in takes}
            self.batch = {**{n: t for n, t in batch.items() if n != "labels"}, **made}

    def run(self, batch: Any, **options: Any) -> torch.Tensor:
        self.passes += 1
        torch.manual_seed(self.passes)  # what is drawn at random is not the same again
        output = call(self.model, {**batch, **options} if options else batch)
        return output_of(output).detach()

    def rows(self, index: Any) -> Any:
        """The samples of this index."""
        size = self.size
        return map_tensors(lambda t: t[index] if t.shape[:1] == (size,) else t, self.batch)

    def pairs(
        self, got: torch.Tensor, index: Any = slice(None), columns: Any = slice(None)
    ) -> Pairs:
        """What a pass computed and the same of the whole batch, without padding."""
        if self.mask is None:
            yield got, self.whole[index]
            return
        is_token = self.mask[index][:, columns].bool()
        yield got[is_token], self.whole[index][:, columns][is_token]


def output_of(output: Any) -> torch.Tensor:
    """The logits of a model's output, or its first floating-point tensor."""
    logits = getattr(output, "logits", None)
    made = tensors(output.to_tuple() if hasattr(output, "to_tuple") else output)
    found = logits if logits is not None else next((t for t in made if t.is_floating_point()), None)
    if found is None:
        raise TypeError(f"invariance: the model must return a tensor, got {type(output).__name__}")
    result: torch.Tensor = found
    return result


def _again(runs: _Runs) -> Pairs:
    yield from runs.pairs(runs.run(runs.batch))


def _alone(runs: _Runs) -> Pairs:
    for i in range(runs.size):
        yield from runs.pairs(runs.run(runs.rows(slice(i, i + 1))), slice(i, i + 1))


def _reversed(runs: _Runs) -> Pairs:
    order = torch.arange(runs.size - 1, -1, -1)
    yield from runs.pairs(runs.run(runs.rows(order)), order)


def _larger(runs: _Runs) -> Pairs:
    order = torch.arange(5 * runs.size) % runs.size
    yield from runs.pairs(runs.run(runs.rows(order)), order)


def _threads(runs: _Runs) -> Pairs:
    before = torch.get_num_threads()
    try:
        for count in {1, 2, 3, 8} - {before}:
            torch.set_num_threads(count)
            yield from runs.pairs(runs.run(runs.batch))
    finally:
        torch.set_num_threads(before)


def _training(runs: _Runs) -> Pairs:
    was = runs.model.training
    runs.model.train(not was)
    try:
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            yield from runs.pairs(runs.run(runs.batch))
    finally:
        runs.model.train(was)


def _compiled(runs: _Runs) -> Pairs:
    compiled: Any = torch.compile(runs.model)
    yield from runs.pairs(output_of(call(compiled, runs.batch)).detach())


class _Checkpointed(nn.Module):
    """A model whose forward pass is computed again in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.model, *args, use_reentrant=False, **kwargs)


def _checkpointed(runs: _Runs) -> Pairs:
    """The gradients of a pass that is computed again in backward, with those of one that is not."""
    weights = [p for p in runs.model.parameters() if p.requires_grad]

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        with torch.enable_grad():
            value = output_of(call(model, runs.batch))
            grads = torch.autograd.grad(value.float().square().mean(), weights, allow_unused=True)
        return [g for g in grads if g is not None]

    yield from zip(gradients(_Checkpointed(runs.model)), gradients(runs.model), strict=True)


def _padded(on_the_left: bool) -> Callable[[_Runs], Pairs]:
    def run(runs: _Runs) -> Pairs:
        assert runs.mask is not None
        pad = (_PADDING, 0) if on_the_left else (0, _PADDING)
        longer = {
            name: nn.functional.pad(t, pad) if t.shape[:2] == runs.mask.shape else t
            for name, t in runs.batch.items()
        }
        got = runs.run(longer)
        yield from runs.pairs(got[:, _PADDING:] if on_the_left else got[:, :-_PADDING])

    return run


def _unpadded(runs: _Runs) -> Pairs:
    for i in range(runs.size):
        assert runs.mask is not None
        yield runs.run(_without_padding(runs, i))[0], runs.whole[i, runs.mask[i].bool()]


def _without_padding(runs: _Runs, i: int) -> dict[str, torch.Tensor]:
    """Sample i alone."""
    assert runs.mask is not None
    seen, shape = runs.mask[i].bool(), runs.mask.shape
    batch = runs.batch.items()
    return {n: t[i : i + 1, seen] if t.shape[:2] == shape else t for n, t in batch}


def _packed(runs: _Runs) -> Pairs:
    """All samples in one row, told apart by their positions."""
    assert runs.mask is not None
    seen = runs.mask.bool()
    packed = {
        name: t[seen][None]
        for name, t in runs.batch.items()
        if t.shape[:2] == seen.shape and name != "attention_mask"
    }
    yield runs.run(packed, use_cache=False)[0], runs.whole[seen]


def _cached(kind: str, by_token: bool) -> Callable[[_Runs], Pairs]:
    """The first part of the text, then the rest in two parts or token by token, with a cache."""

    def run(runs: _Runs) -> Pairs:
        assert runs.mask is not None
        columns = runs.mask.shape[1]
        first = max(columns // 2, 1)
        steps = range(first, columns) if by_token else [first, (first + columns) // 2]
        cache = _cache(kind, runs.model, columns)
        start = 0
        for end in sorted({first, *(i + 1 for i in steps if by_token), *steps, columns} - {0}):
            part = slice(start, end)
            piece = {
                name: (t[:, :end] if name == "attention_mask" else t[:, part])
                if t.shape[:2] == runs.mask.shape
                else t
                for name, t in runs.batch.items()
            }
            got = runs.run(piece, **{_cache_name(runs.model): cache}, use_cache=True)
            yield from runs.pairs(got, slice(None), part)
            start = end

    return run


def _cache_name(model: nn.Module) -> str:
    """The argument for a cache, as this version of transformers names it; "" for no such model."""
    takes = inspect.signature(model.forward).parameters
    names = ("cache", "past_key_values") if "transformers" in sys.modules else ()
    return next((name for name in names if name in takes), "")


def _cache(kind: str, model: Any, columns: int) -> Any:
    library: Any = sys.modules["transformers"]
    if kind == "static":
        return library.StaticCache(config=model.config, max_cache_len=columns + 3)
    return library.DynamicCache(config=model.config)


_CASES: dict[str, Callable[[_Runs], Pairs]] = {
    "again": _again,
    "each sample alone": _alone,
    "other order": _reversed,
    "larger batch": _larger,
    "other threads": _threads,
    "training mode": _training,
    "checkpointed gradients": _checkpointed,
    "padding right": _padded(False),
    "padding left": _padded(True),
    "without padding": _unpadded,
    "packed": _packed,
    "in chunks": _cached("dynamic", by_token=False),
    "dynamic cache": _cached("dynamic", by_token=True),
    "static cache": _cached("static", by_token=True),
    "compiled": _compiled,
}
_OF_TEXT = {"padding right", "padding left", "without padding", "packed"}
_OF_CACHES = {"in chunks", "dynamic cache", "static cache"}
_PADDED = {"padding right", "padding left"}  # each sample, which is then a part of what is computed
_NOT_FOLLOWED = {
    "compiled": "compiled code, whose kernels are those of the sizes that it was compiled for",
    "checkpointed gradients": "a gradient: something in the forward pass is not the same again",
}


def invariance(model: nn.Module, *batch: Any, cases: Collection[str] | None = None) -> Invariance:
    """Find where the output of `model` for a sample, or a token, depends on what is beside it.

        print(mixprec.invariance(model, {"input_ids": tokens, "attention_mask": mask}))

    The output for the whole batch is compared, bit by bit, with that of each sample alone, of the
    batch in another order and five times as large, with other numbers of threads, in training mode
    (in a model in training mode: in evaluation), and the gradients of a checkpoint with those
    without. Of a mapping with input_ids [B, T], also with padding of 5 columns on the right and on
    the left, of each sample without its padding, and of all samples packed in one row; of causal
    models of transformers in two chunks, and token by token with a dynamic and a static cache.
    Padding is not compared.

    batch: the arguments of model, or one mapping of its keyword arguments, with the samples in the
    first dimension; position_ids are counted from the first token that attention_mask shows. cases:
    the names of some; "compiled" is run only if it is named.

    Where bits differ, both passes run again, op by op: of an op, each row of what it returns, along
    the last dimension, must occur among those that the same op of the same module returns in the
    other pass. The first one of equal operands that returns others is named, with why. Without such
    an op (in compiled code, in kernels of other libraries) the text says so.

    Parameters, buffers, gradients and random states stay as they are. ValueError for names that are
    no cases.
    """
    names = [name for name in _CASES if name != "compiled"] if cases is None else [*cases]
    if unknown := [name for name in names if name not in _CASES]:
        raise ValueError(f"invariance: cases must be some of {', '.join(_CASES)}, got {unknown}")
    runs = _Runs(model, batch[0] if len(batch) == 1 else batch)
    report = Invariance()
    for name in names:
        reason = _not_run(name, runs)
        report.append(Case(name, None, reason) if reason else _compared(name, runs))
    return report


def _not_run(name: str, runs: _Runs) -> str:
    if name in _OF_TEXT | _OF_CACHES and runs.mask is None:
        return "the batch has no input_ids"
    takes = inspect.signature(runs.model.forward).parameters
    if name in _OF_CACHES and not _cache_name(runs.model):
        return "the model is no causal model of transformers"
    if name == "packed" and "position_ids" not in takes:
        return "the model takes no position_ids"
    return ""


def _compared(name: str, runs: _Runs) -> Case:
    run, worst = _CASES[name], runs
    parts = [runs]
    if name in _PADDED:
        parts = [_Runs(runs.model, _without_padding(runs, i)) for i in range(runs.size)]
    gap = 0.0
    try:
        for part in parts:
            with _from_one_state(part):
                part.whole = part.run(part.batch)
            with _from_one_state(part):
                own = max(_gap(got, want) for got, want in run(part))
            gap, worst = (own, part) if own > gap else (gap, worst)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return Case(name, None, f"{type(error).__name__}: {error}")
    if gap == 0 or name in _NOT_FOLLOWED:
        return Case(name, gap, _NOT_FOLLOWED[name] if gap else "")
    whole, other = Rows(runs.model), Rows(runs.model)
    with _from_one_state(worst), whole:
        worst.run(worst.batch)
    with _from_one_state(worst), other:
        deque(run(worst), 0)
    checked, among = (whole, other) if name in _PADDED else (other, whole)
    return Case(name, gap, first_difference(checked, among))


@contextlib.contextmanager
def _from_one_state(runs: _Runs) -> Iterator[None]:
    with restored(runs.model, tensors(runs.batch)), torch.no_grad():
        yield


def _gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; 0 only for the same bits, where any NaN equals any NaN."""
    a, b = got.double(), want.double()
    if a.shape != b.shape:
        return float("inf")
    away = (a - b).abs().masked_fill(a.isnan() & b.isnan() | (a == b), 0.0)
    return float(away.nan_to_num(torch.inf).max()) if away.numel() else 0.0
