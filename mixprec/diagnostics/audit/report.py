"""audit: which precision each product of a training step really had, and who decided it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...recipes import Recipe
from ..batches import call, scalar_loss, tensors
from ..recorded import finite
from ..report_table import aligned
from ..unchanged import as_before
from . import findings, lost_findings, page, sqnr_table
from . import what_if as losses
from .diff import Diff
from .op import AGAIN, FORWARD, PRODUCTS, SHORT, STEP, Op, joined, readable
from .recorder import Recorder
from .shadow import Shadow
from .trace import Point


class Audit:
    """What `audit` found. str() is `findings` and `table()`.

    ops: a list of Op, by FLOPs; findings: sentences, the worst first; notes: what audit does not
    show of this run; flops: by precision, all phases but those of optimizers; points: with
    sqnr=True, what `diff` compares.
    """

    ops: list[Op]
    findings: list[str]
    notes: list[str]
    points: list[Point]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        sqnr: bool = False,
        what_if: Iterable[Recipe | str] = (),
    ) -> None:
        others = losses.parse(what_if)
        self._shadow = Shadow(model.parameters(), others) if sqnr or others else None
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._stack: contextlib.ExitStack | None = None
        self.ops, self.findings, self.notes, self.points = [], [], [], []

    def __enter__(self) -> Audit:
        if self._stack is not None:
            raise RuntimeError("audit: a block that has begun cannot be entered again")
        self._recorder = Recorder(self._model, self._optimizer, self._scaler, self._shadow)
        stack = contextlib.ExitStack()
        # Inside of a region of torch.autocast: what it has cast before has no known origin.
        torch.clear_autocast_cache()
        stack.enter_context(self._recorder.recording())
        self._stack = stack
        return self

    def __exit__(self, *error: object) -> None:
        assert self._stack is not None, "entered"
        self._stack.close()
        self.ops = sorted(
            (replace(op, **vars(total)) for op, total in self._recorder.ops.items()),
            key=lambda op: -op.flops,
        )
        self.findings = findings.collect(self, self._model, self._scaler, self._recorder)
        self.notes = findings.notes(self._model, self._recorder)
        if self._recorder.pools:
            self.notes.append(
                "max_pool1d of what needs no gradient has other strides in an audit: a dropout "
                "behind it draws its mask in another order."
            )
        del self._recorder
        if self._shadow is not None:
            self.findings += lost_findings.collect(self.ops)
            self.notes += lost_findings.notes(self._shadow.not_followed)
            self.points = self._shadow.trace.points
            self._shadow.clear()

    @property
    def flops(self) -> dict[str, int]:
        return _share(self.ops, lambda op: op.precision)

    @property
    def decided(self) -> dict[str, int]:
        """FLOPs by who decided, as `flops`."""
        return _share(self.ops, lambda op: op.decided)

    def __str__(self) -> str:
        found = [*(f"- {finding}" for finding in self.findings), *self.notes]
        if not self.flops:
            return "\n".join([*found, self.summary()])
        more = [] if self._shadow is None else ["", self.sqnr_table()]
        return "\n".join([*found, self.summary(), "", self.table(), *more])

    def summary(self) -> str:
        """The shares of precisions, and of who decided them."""
        total = sum(self.flops.values())
        if not total:
            return "no products"
        parts = [
            ", ".join(f"{n / total:.1%} {name}" for name, n in found.items())
            for found in (self.flops, self.decided)
        ]
        again = sum(op.flops for op in self.ops if op.phase == AGAIN)
        more = f", {again / total:.1%} computed again in backward" if again else ""
        return f"{readable(total)}FLOP{more}: {parts[0]}. Decided by: {parts[1]}"

    def table(self, most: int = 40) -> str:
        """A line for each module, or line of the program, and kind of op, the one with most FLOPs
        first; at most `most` of them."""
        lines = [["module", "op", "forward", "backward", "sum", "decided by", "FLOP", "again"]]
        groups: dict[tuple[str, str], list[Op]] = {}
        for op in self.ops:
            if op.kind in PRODUCTS:
                groups.setdefault((op.where, op.kind), []).append(op)
        ranked = sorted(groups.items(), key=lambda item: -sum(op.flops for op in item[1]))
        for (where, kind), ops in ranked[:most]:
            lines.append([
                where,
                kind,
                *(joined(op.precision for op in ops if (op.phase == FORWARD) == forward)
                  for forward in (True, False)),
                joined(SHORT.get(op.accumulation, op.accumulation) for op in ops),
                joined(op.decided for op in ops),
                readable(sum(op.flops for op in ops if op.phase != AGAIN)),
                readable(sum(op.flops for op in ops if op.phase == AGAIN)) or "-",
            ])  # fmt: skip
        text = aligned(lines)
        rest = len(ranked) - most
        return "\n".join(text + ([f"and {rest} more"] if rest > 0 else []))

    def sqnr_table(self, most: int | None = 40) -> str:
        """With sqnr=True: what each product, convolution, attention and RNN has lost, in dB of SQNR
        against FP32, the one with the largest error of its own first; at most `most` of them.

        own: with the operands that it had, as they were before they were cast for it; total: in a
        whole step in FP32. x, w, g: of the casts of inputs, weights and gradients.
        """
        return sqnr_table.table(self.ops, most)

    def diff(self, other: Audit | str | os.PathLike[str]) -> Diff:
        """Find where this step and another one part by more than rounding explains: of two
        precisions, two versions of a program, before and after convert. Both with sqnr=True.

        other: an Audit, or the path of a file that `save` has written. ValueError if they have no
        op in common, or were made without sqnr=True.
        """
        return Diff(_points(self), _points(other))

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes."""
        return {
            "findings": self.findings,
            "notes": self.notes,
            "flops": self.flops,
            "decided": self.decided,
            "ops": [_row(op) for op in self.ops],
            "points": [vars(point) for point in self.points],
        }

    def save_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Write a page with the findings, a tree of modules and a table to sort and filter: one
        file, which needs no network."""
        name = title or f"Audit of {type(self._model).__name__}"
        Path(path).write_text(page.html(self, self._model, name), encoding="utf-8")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, with null for NaN and Inf."""
        found = finite(self.to_dict())
        Path(path).write_text(json.dumps(found, indent=1, allow_nan=False))


def _points(audit: Audit | str | os.PathLike[str]) -> list[Point]:
    if isinstance(audit, Audit):
        found = audit.points
    else:
        found = [Point.of_json(row) for row in json.loads(Path(audit).read_text())["points"]]
    if not found:
        raise ValueError("diff: both audits must be made with sqnr=True, and have run a product")
    return found


def _row(op: Op) -> dict[str, Any]:
    found = {**asdict(op), "precision": op.precision}
    for name, lost in op.lost.items():
        found["lost"][name].update(own=lost.own, total=lost.total)
    return found


def _share(ops: Iterable[Op], key: Callable[[Op], str]) -> dict[str, int]:
    """FLOPs of a step by a key, the largest first."""
    found: Counter[str] = Counter()
    for op in ops:
        if op.flops and op.phase != STEP:
            found[key(op)] += op.flops
    return dict(found.most_common())


def audit(
    model: nn.Module,
    *batch: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    sqnr: bool = False,
    what_if: Iterable[Recipe | str] | Recipe | str = (),
) -> Audit:
    """Find which precision each matrix product, convolution, attention, RNN and reduction of
    `model` really has, forward and backward, and who decided it.

        with mixprec.audit(model, optimizer=optimizer, scaler=scaler) as a:
            train_step()                        # your own: autocast, scaler, micro-batches
        print(a)

        print(mixprec.audit(model, tokens))     # one forward and backward pass

    model: any module: torch's own, under torch.autocast, converted, of another library. It is
    neither changed nor given hooks: ops are seen as torch dispatches them. optimizer and scaler:
    those that the block uses, for what is said of them.

    batch: the arguments of model, or one mapping of its keyword arguments: a forward and a backward
    pass runs at once, which leaves gradients, buffers and random generators as they were. Findings
    about the optimizer and the scaler need the block. loss(output) returns the scalar to
    differentiate; None: it is the output, or output.loss or output["loss"].

    sqnr: compute each op once more in FP32, twice where its operands are not those of a step in
    FP32, and report what it loses: see `Audit.sqnr_table` and `Lost`. Random draws and the choices
    of topk, sort and max follow the step. A step takes several times as long, and memory for the
    activations in FP32. what_if: recipes, as "fp8-block": also what the products of layers would
    lose had their operands been cast by these, on what they have now.

    A product counts 2 FLOPs for a multiplication and an addition; causal attention counts as
    attention without a mask. "computed again" are FLOPs of a checkpoint's second forward pass.
    Compiled models run uncompiled until the block ends, in all threads: see
    `torch.compiler.set_stance`. Kernels of other libraries and NumPy are not visible. Until the
    block ends, this thread's ops run under a dispatch mode and a function mode of torch.

    ValueError if the loss is not one number; TypeError for arguments that do not belong together;
    RuntimeError for torch.inference_mode inside of torch.autocast.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit: model must be a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(value, torch.optim.Optimizer) for value in batch):
        raise TypeError("audit: give optimizer= and scaler= by name; the others are a batch")
    if batch and (optimizer is not None or scaler is not None):
        raise TypeError(
            "audit: optimizer= and scaler= are for a block, around a step that uses them"
        )
    if not batch and loss is not None:
        raise TypeError("audit: loss= is for a batch; in a block call backward() yourself")
    others = (what_if,) if isinstance(what_if, (Recipe, str)) else what_if
    found = Audit(model, optimizer, scaler, sqnr, others)
    if not batch:
        return found
    arguments = batch[0] if len(batch) == 1 else batch
    with as_before(model), _kept(tensors(batch)), found:
        output = call(model, arguments)
        output = output if loss is None else loss(output)
        value = scalar_loss("audit", output, "pass loss=, a function of the model's output")
        if value.requires_grad:
            value.backward()
    if not torch.isfinite(value):
        found.findings.insert(0, f"the loss is {float(value.detach())}")
    if not value.requires_grad:
        found.notes.append("There was no backward pass: the loss needs no gradient.")
    return found


@contextlib.contextmanager
def _kept(inputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave the gradients of a batch as they were."""
    before = [(t, t.grad) for t in inputs if t.is_leaf]
    for t, _ in before:
        t.grad = None
    try:
        yield
    finally:
        for t, grad in before:
            t.grad = grad
