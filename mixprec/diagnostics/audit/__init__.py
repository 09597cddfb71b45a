"""audit: which precision each product of a training step really had, and what set it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...recipes import Recipe
from ..passes import restored, scalar_loss, tensors
from ..writers import finite, joined
from . import findings, render
from .diff import Diff, Point
from .noise import what_if_recipes
from .records import Op, flops_by
from .shadow import Shadow
from .trace import Recorder


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
        others = what_if_recipes(what_if)
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
        recorder, shadow = self._recorder, self._shadow
        del self._recorder
        self.ops = sorted(recorder.ops, key=lambda op: -op.flops)
        self.findings = findings.collect(self.ops, self._model, self._scaler, recorder)
        self.notes = findings.notes(self._model, recorder)
        if shadow is not None:
            self.findings += findings.of_losses(self.ops)
            if left := shadow.not_followed:
                how = "Not computed again in FP32, and taken as they are"
                self.notes.append(f"{how}: {joined(left, 5)}.")
            self.points = recorder.points
            shadow.clear()

    @property
    def flops(self) -> dict[str, int]:
        return flops_by(lambda op: op.precision, self.ops)

    @property
    def decided(self) -> dict[str, int]:
        """FLOPs by what set the formats, as `flops`."""
        return flops_by(lambda op: op.decided, self.ops)

    def __str__(self) -> str:
        lines = [*(f"- {finding}" for finding in self.findings), *self.notes, self.summary()]
        if self.flops:
            lines += ["", self.table()]
            if self._shadow is not None:
                lines += ["", self.sqnr_table()]
        return "\n".join(lines)

    def summary(self) -> str:
        """The shares of precisions, and of what set them."""
        return render.summary(self.ops)

    def table(self, most: int = 40) -> str:
        """A line for each module, or line of the program, and kind of op, the one with most FLOPs
        first; at most `most` of them."""
        return render.table(self.ops, most)

    def sqnr_table(self, most: int | None = 40) -> str:
        """With sqnr=True: what each product, convolution, attention and RNN has lost, in dB of SQNR
        against FP32, the one with the largest error of its own first; at most `most` of them.

        own: with the operands that it had, as they were before they were cast for it; total: in a
        whole step in FP32. x, w, g: of the casts of inputs, weights and gradients.
        """
        return render.sqnr_table(self.ops, most)

    def diff(self, other: Audit | str | os.PathLike[str]) -> Diff:
        """Find where this step and another one diverge by more than rounding explains: of two
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
        page = render.html(
            self.ops, self._model, name, findings=self.findings, notes=self.notes,
            has_losses=bool(self.points),
        )  # fmt: skip
        Path(path).write_text(page, encoding="utf-8")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, with null for NaN and Inf."""
        content = finite(self.to_dict())
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False))


def _points(audit: Audit | str | os.PathLike[str]) -> list[Point]:
    if isinstance(audit, Audit):
        points = audit.points
    else:
        points = [Point.of_json(row) for row in json.loads(Path(audit).read_text())["points"]]
    if not points:
        raise ValueError("diff: both audits must be made with sqnr=True, and have run a product")
    return points


def _row(op: Op) -> dict[str, Any]:
    row = {**asdict(op), "precision": op.precision}
    for name, lost in op.lost.items():
        row["lost"][name].update(own=lost.own, total=lost.total)
    return row


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
    `model` really has, forward and backward, and what set it.

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
    recipes = (what_if,) if isinstance(what_if, (Recipe, str)) else what_if
    report = Audit(model, optimizer, scaler, sqnr, recipes)
    if not batch:
        return report
    arguments = batch[0] if len(batch) == 1 else batch
    with restored(model, tensors(batch)), report:
        remedy = "pass loss=, a function of the model's output"
        value = scalar_loss("audit", model, arguments, loss, remedy)
        if value.requires_grad:
            value.backward()
    if not torch.isfinite(value):
        report.findings.insert(0, f"the loss is {float(value.detach())}")
    if not value.requires_grad:
        report.notes.append("There was no backward pass: the loss needs no gradient.")
    return report


def bisect(
    model_a: nn.Module,
    model_b: nn.Module,
    *batch: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Diff:
    """Find where two models diverge that should compute the same: before and after mixprec.convert,
    in FP32 and in bf16, of two versions of a program.

        print(mixprec.bisect(model, mixprec.convert(copy.deepcopy(model), "fp8"), tokens))

    One forward and backward pass of each, as in `mixprec.audit` with sqnr=True, from the same
    random state, leaves both models as they were. What a model would compute in FP32 is compared
    with the same of the other, so that rounding does not count, and each op with what it would
    have returned in FP32, so that rounding that is too coarse does. See `Diff`.

    batch, loss: as in `mixprec.audit`. Ops are compared by the module that owns them, so that both
    models need the same names. ValueError if they have no op in common.
    """
    first = audit(model_a, *batch, loss=loss, sqnr=True)
    return first.diff(audit(model_b, *batch, loss=loss, sqnr=True))
