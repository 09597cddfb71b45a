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
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ..ops._dispatch import checks
from .audit.rows import Rows, first_difference
from .passes import call, map_tensors, restored, tensors
from .writers import aligned

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
_PADDING = 5  # columns, no multiple of a vector


@dataclass
class Case:
    """name: how the model was run; gap: the largest difference of an element of its output from
    that of the whole batch, 0 for equal bits, None where it was not run, NaN for an error; said:
    the first operation that differs and why, the error, or why it was not run."""

    name: str
    gap: float | None
    said: str = ""


class Invariance(list[Case]):
    """The cases of `invariance`; str() is a table."""

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
    """Passes of a model over a batch and parts of it; whole: the output of all of it; mask [B, T]:
    of text, 1 for a token, else [B, 0]."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model, self.batch, self.whole, self.passes = model, batch, torch.empty(0), 0
        self.takes = inspect.signature(model.forward).parameters
        self.size = next((t.shape[0] for t in tensors(batch) if t.dim() > 0), 0)
        self.mask = torch.empty(self.size, 0, dtype=torch.long)
        if isinstance(batch, Mapping) and "input_ids" in batch:
            ids = batch["input_ids"]
            self.mask = batch.get("attention_mask", torch.ones_like(ids)).long()
            places = (self.mask.cumsum(1) - 1).clamp_min(0)
            made = {"attention_mask": self.mask, "position_ids": places}
            made = {name: t for name, t in made.items() if name in self.takes}
            self.batch = {**{n: t for n, t in batch.items() if n != "labels"}, **made}

    def run(self, batch: Any, model: Any = None) -> torch.Tensor:
        """The logits of the output, or its first floating-point tensor."""
        self.passes += 1
        torch.manual_seed(self.passes)  # what is drawn at random is not the same again
        output = call(self.model if model is None else model, batch)
        logits = getattr(output, "logits", None)
        made = tensors(output.to_tuple() if hasattr(output, "to_tuple") else output)
        y = next((t for t in (logits, *made) if t is not None and t.is_floating_point()), None)
        if y is None:
            kind = type(output).__name__
            raise TypeError(f"invariance: the model must return a tensor, got {kind}")
        return y

    def rows(self, index: Any) -> Any:
        """The samples of this index."""
        return map_tensors(lambda t: t[index] if t.shape[:1] == (self.size,) else t, self.batch)

    def text(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """The batch with function(name, t) in place of its tensors [B, T]."""
        shape = self.mask.shape
        return {n: function(n, t) if t.shape[:2] == shape else t for n, t in self.batch.items()}

    def pairs(self, got: torch.Tensor, index: Any = slice(None), part: Any = slice(None)) -> Pairs:
        """What a pass computed and the same of the whole batch, without padding."""
        seen = self.mask[index][:, part].bool() if self.mask.numel() else slice(None)
        want = self.whole[index][:, part] if self.mask.numel() else self.whole[index]
        yield got[seen], want[seen]


def _samples(order: Callable[[int], list[Any]]) -> Callable[[_Runs], Pairs]:
    """Passes with the samples of these indices."""

    def run(runs: _Runs) -> Pairs:
        for index in order(runs.size):
            yield from runs.pairs(runs.run(runs.rows(index)), index)

    return run


def _threads(runs: _Runs) -> Pairs:
    before = torch.get_num_threads()
    try:
        for count in {1, 2, 3, 8} - {before}:
            torch.set_num_threads(count)
            yield from runs.pairs(runs.run(runs.batch))
    finally:
        torch.set_num_threads(before)


def _training(runs: _Runs) -> Pairs:
    runs.model.train(not runs.model.training)  # `restored` takes it back
    with torch.enable_grad():
        yield from runs.pairs(runs.run(runs.batch).detach())


class _Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.model, *args, use_reentrant=False, **kwargs)


def _gradients(runs: _Runs) -> Pairs:
    weights = [p for p in runs.model.parameters() if p.requires_grad]
    both, passes = [], runs.passes
    for model in (_Checkpointed(runs.model), runs.model):
        runs.passes = passes  # gradients may be rounded at random: the same draws
        with torch.enable_grad():
            loss = runs.run(runs.batch, model).float().square().mean()
            both.append(torch.autograd.grad(loss, weights, allow_unused=True))
    yield from ((a, b) for a, b in zip(*both, strict=True) if a is not None and b is not None)


def _padded(*sides: int) -> Callable[[_Runs], Pairs]:
    def run(runs: _Runs) -> Pairs:
        got = runs.run(runs.text(lambda _, t: pad(t, sides)))
        yield from runs.pairs(got[:, sides[0] : got.shape[1] - sides[1]])

    return run


def _without_padding(runs: _Runs) -> Pairs:
    for i, seen in enumerate(runs.mask.bool()):
        yield runs.run(_sample(runs, i))[0], runs.whole[i, seen]


def _sample(runs: _Runs, i: int) -> dict[str, Any]:
    """Sample i, without padding."""
    return runs.text(lambda _, t: t[i : i + 1, runs.mask[i].bool()])


def _packed(runs: _Runs) -> Pairs:
    seen = runs.mask.bool()
    packed = runs.text(lambda _, t: t[seen][None])
    packed.pop("attention_mask", None)
    yield runs.run({**packed, "use_cache": False})[0], runs.whole[seen]


def _cached(kind: str, by_token: bool) -> Callable[[_Runs], Pairs]:
    """The first half of the text, then the rest in two parts or token by token."""

    def run(runs: _Runs) -> Pairs:
        columns, library = runs.mask.shape[1], sys.modules["transformers"]
        most = {"max_cache_len": columns + 3} if kind == "StaticCache" else {}
        cache = getattr(library, kind)(config=runs.model.config, **most)
        half, start = (columns + 1) // 2, 0
        ends = range(half, columns + 1) if by_token else {half, (half + columns) // 2, columns}
        for end in sorted(ends):
            part = slice(start, end)
            piece = {n: t[:, part] for n, t in runs.batch.items() if t.shape[:2] == runs.mask.shape}
            piece |= {"attention_mask": runs.mask[:, :end], _cache_name(runs): cache}
            yield from runs.pairs(runs.run({**piece, "use_cache": True}), slice(None), part)
            start = end

    return run


def _cache_name(runs: _Runs) -> str:
    """The argument for a cache, as this version of transformers names it, or ""."""
    names = ("cache", "past_key_values") if "transformers" in sys.modules else ()
    return next((name for name in names if name in runs.takes), "")


_CASES: dict[str, Callable[[_Runs], Pairs]] = {
    "again": _samples(lambda size: [slice(None)]),
    "each sample alone": _samples(lambda size: [slice(i, i + 1) for i in range(size)]),
    "other order": _samples(lambda size: [torch.arange(size - 1, -1, -1)]),
    "larger batch": _samples(lambda size: [torch.arange(5 * size) % size]),
    "other threads": _threads,
    "training mode": _training,
    "checkpointed gradients": _gradients,
    "padding right": _padded(0, _PADDING),
    "padding left": _padded(_PADDING, 0),
    "without padding": _without_padding,
    "packed": _packed,
    "in chunks": _cached("DynamicCache", by_token=False),
    "dynamic cache": _cached("DynamicCache", by_token=True),
    "static cache": _cached("StaticCache", by_token=True),
    "compiled": lambda runs: runs.pairs(runs.run(runs.batch, torch.compile(runs.model))),
}
_PADDED = ("padding right", "padding left")  # each sample is a part of what is computed
_NEEDS = {
    **dict.fromkeys((*_PADDED, "without padding"), "input_ids"),
    "packed": "position_ids",
    **dict.fromkeys(("in chunks", "dynamic cache", "static cache"), "a cache of transformers"),
}
_NOT_FOLLOWED = {
    "compiled": "compiled code, whose kernels are those of the sizes that it was compiled for",
    "checkpointed gradients": "the forward pass is not the same again",
}


def invariance(model: nn.Module, *batch: Any, cases: Collection[str] | None = None) -> Invariance:
    """Find where the output of `model` for a sample, or a token, depends on what is beside it.

        print(mixprec.invariance(model, {"input_ids": tokens, "attention_mask": mask}))

    The output for the whole batch is compared, bit by bit, with that of each sample alone, of the
    batch in another order and five times as large, with other numbers of threads, in training mode
    (in a model in training mode: in evaluation), and the gradients of a checkpoint with those
    without. Of a mapping with input_ids [B, T], also with 5 columns of padding, of each sample
    without its padding, and of all samples packed in one row; of causal models of transformers in
    chunks, and token by token with a dynamic and a static cache. Padding is not compared.

    batch: the arguments of model, or one mapping of its keyword arguments, with the samples in the
    first dimension; position_ids are counted from the first token that attention_mask shows. cases:
    the names of some; "compiled" is run only if it is named.

    Where bits differ, both passes run again, op by op: each row that an op returns, along the last
    dimension, must be among those that the same op of the same module returns in the other pass.
    The first one that returns others, of equal operands, is named, with why.

    Parameters, buffers, gradients and random states stay as they are. TypeError for a model that is
    no module, ValueError for a batch without samples and for other cases.
    """
    checks.is_module("invariance", model)
    names = [name for name in _CASES if name != "compiled"] if cases is None else [*cases]
    if unknown := [name for name in names if name not in _CASES]:
        raise ValueError(f"invariance: cases must be some of {', '.join(_CASES)}, got {unknown}")
    runs = _Runs(model, batch[0] if len(batch) == 1 else batch)
    if runs.size == 0:
        raise ValueError("invariance: batch must have tensors [B, ...] with B > 0, got none")
    has = {"input_ids": runs.mask.numel(), "position_ids": "position_ids" in runs.takes}
    has["a cache of transformers"] = bool(_cache_name(runs))
    report = Invariance()
    for name in names:
        needs = _NEEDS.get(name)
        if needs is not None and not (has["input_ids"] and has[needs]):
            report.append(Case(name, None, f"needs a batch with input_ids, and {needs}"))
            continue
        try:
            report.append(_compared(name, runs))
        except Exception as error:  # of the model, which the other cases may not have
            report.append(Case(name, float("nan"), f"{type(error).__name__}: {error}"))
    return report


def _compared(name: str, runs: _Runs) -> Case:
    run, parts, gap, worst = _CASES[name], [runs], 0.0, runs
    if name in _PADDED:
        seen = [i for i in range(runs.size) if runs.mask[i].any()]
        parts = [_Runs(runs.model, _sample(runs, i)) for i in seen]
    for part in parts:
        with _from_one_state(part):
            part.whole = part.run(part.batch)
        with _from_one_state(part):
            own = max(_gap(got, want) for got, want in run(part))
        gap, worst = (own, part) if own > gap else (gap, worst)
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
    same = (a == b) | (a.isnan() & b.isnan())
    away = (a - b).abs().nan_to_num(torch.inf).masked_fill(same, 0.0)
    return float(away.max()) if away.numel() else 0.0
