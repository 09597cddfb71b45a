"""The report of compare(): one row per recipe, as a table, as JSON and as a figure."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .._checkpoint_file import replace_file
from ..amp.rules import power
from . import plotting
from .suggest import Overrides, sqnr_table
from .writers import aligned, finite, readable

KINDS = ("forward", "grad_input", "grad_weight")


@dataclass
class Row:
    """One training run. Losses are as returned by the model; None means "not measured".

    status: "complete", or where and why the run ended. seconds and units (tokens, samples, ...):
    one entry per training step; parts: the seconds of its "forward", "backward", "optimizer" and
    "scaler". Bytes: parameters, gradients and optimizer state (FP32 masters included) after a step;
    saved: what autograd kept for the first backward pass, each storage once, without parameters;
    peak: the largest allocation on a GPU. gemms[module, kind, formats] counts calls; expected[kind]
    is the recipe's formats, expected_in[module][kind] those of a plan. data: one CRC-32 per step of
    the batches so far. sqnr: measured by compare(sqnr=True), by layer, see
    `mixprec.diagnostics.suggest.model_sqnr`. reseeded: it is fp32 again, from another seed,
    which shows what chance changes.
    """

    recipe: str
    status: str = "not started"
    validation_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None
    gemms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    expected: dict[str, str] = field(default_factory=dict)
    expected_in: dict[str, dict[str, str]] = field(default_factory=dict)
    data: list[int] = field(default_factory=list)
    sqnr: dict[str, dict[str, Any]] = field(default_factory=dict)
    reseeded: bool = False

    @property
    def steps(self) -> int:
        """How many training steps were completed, skipped ones included."""
        return len(self.seconds)

    @property
    def speed(self) -> float | None:
        """Units per second, the median over the steps."""
        if not self.seconds:
            return None
        return statistics.median(u / s for u, s in zip(self.units, self.seconds, strict=True))

    def gemm_counts(self, module: str | None = None) -> dict[str, dict[str, int]]:
        """{kind: {formats: calls}} of one module, or summed over all of them."""
        counts: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        for (name, kind, formats), n in self.gemms.items():
            if module in (None, name):
                counts[kind][formats] = counts[kind].get(formats, 0) + n
        return counts


@dataclass
class Report:
    """The result of compare(): a row for each recipe, in order; `str(report)` is a table.

    The table shows losses times loss_factor under loss_name (1 / ln 2 turns nats into bits): the
    validation loss, or, where none was measured, the training loss of the last tenth of the steps.
    options and environment describe the run and the machine; interrupted: Ctrl-C ended it.
    """

    unit: str = "samples"
    loss_name: str = "loss"
    loss_factor: float = 1.0
    interrupted: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __getitem__(self, recipe: str) -> Row:
        """The row of a recipe; KeyError, listing the existing rows, if there is none."""
        for row in self.rows:
            if row.recipe == recipe:
                return row
        raise KeyError(f"no row {recipe!r}; there are {', '.join(r.recipe for r in self.rows)}")

    @property
    def _validated(self) -> bool:
        """Whether there is a validation loss."""
        return any(row.validation_loss is not None for row in self.rows)

    def loss(self, row: Row) -> float | None:
        """The validation loss; where no row has one, the mean training loss of the last tenth of
        the steps."""
        if self._validated or not row.losses:
            return row.validation_loss
        return statistics.fmean(row.losses[-max(1, len(row.losses) // 10) :])

    def difference(self, row: Row) -> float | None:
        """Relative difference of the loss to fp32's: 0.01 is one percent worse."""
        base = next((self.loss(r) for r in self.rows if r.recipe == "fp32"), None)
        loss = self.loss(row)
        return None if not base or loss is None else loss / base - 1

    def chance(self) -> float | None:
        """How much another seed changes the loss of fp32, relatively: the size of the difference of
        the reseeded row. A smaller one is within run-to-run noise. None without such a row."""
        differences = (self.difference(row) for row in self.rows if row.reseeded)
        return next((abs(x) for x in differences if x is not None and math.isfinite(x)), None)

    def wrong_gemms(self, modules: Iterable[str]) -> list[str]:
        """One sentence for each recipe, module and GEMM kind that did not run in every step, or not
        always with the recipe's operand formats.
        """
        names = list(modules)
        wrong = []
        for row in self.rows:
            for name in names:
                for kind, got in row.gemm_counts(name).items():
                    want = row.expected_in.get(name, row.expected)[kind]
                    if set(got) != {want} or sum(got.values()) < row.steps:
                        seen = ", ".join(f"{n} x ({f})" for f, n in got.items()) or "nothing"
                        wrong.append(
                            f"{row.recipe}: {kind} of {name} should have run as "
                            f"{want} in each of {row.steps} steps, but ran {seen}"
                        )
        return wrong

    def table(self) -> list[list[str]]:
        """The table as lists of strings, the header first."""
        loss = self.loss_name if self._validated else f"train {self.loss_name}"
        header = ["recipe", loss, "vs fp32", f"{self.unit}/s", "params", "grads", "optim", "saved"]
        on_gpu = any(row.peak_bytes is not None for row in self.rows)
        cells = ([*self._cells(row, on_gpu)] for row in self.rows)
        return [[*header, "peak"] if on_gpu else header, *cells]

    def _cells(self, row: Row, on_gpu: bool) -> Iterator[str]:
        loss, difference = self.loss(row), self.difference(row)
        yield row.recipe
        yield "-" if loss is None else f"{loss * self.loss_factor:.4f}"
        yield "-" if difference is None else f"{difference:+.2%}"
        yield "-" if row.speed is None else f"{row.speed:,.0f}"
        sizes = [row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.saved_bytes]
        yield from map(readable, [*sizes, row.peak_bytes] if on_gpu else sizes)

    def notes(self) -> list[str]:
        """What the table has no column for: steps skipped, loss scales, runs that ended early, and
        what another seed changes."""
        longest = max((row.steps for row in self.rows), default=0)
        sentences = []
        for row in self.rows:
            parts = []
            if row.status != "complete" or row.steps < longest:
                parts.append(f"{row.status}, {row.steps} of {longest} steps")
            if row.skipped_steps or row.loss_scale is not None:
                parts.append(f"{row.skipped_steps or 0} of {row.steps} steps skipped")
            if row.loss_scale is not None:
                parts.append(f"loss scale {power(row.loss_scale)} at the end")
            if parts:
                sentences.append(f"{row.recipe}: {', '.join(parts)}")
        return sentences + self._against_chance()

    def _against_chance(self) -> list[str]:
        """Which recipes differ from fp32 by less than another seed does."""
        if (chance := self.chance()) is None:
            return []
        again = " and ".join(row.recipe for row in self.rows if row.reseeded)
        smaller: list[str] = []
        larger: list[str] = []
        for row in self.rows:
            difference = self.difference(row)
            if difference is not None and row.recipe != "fp32" and not row.reseeded:
                (smaller if abs(difference) <= chance else larger).append(row.recipe)
        chance_or_not = "a larger one, which a single run cannot tell from chance"
        return [
            f"{again}: fp32 from another seed, which changes the loss by {chance:.2%}",
            *([f"{', '.join(smaller)}: within run-to-run noise"] if smaller else []),
            *([f"{', '.join(larger)}: {chance_or_not}"] if larger else []),
        ]

    def __str__(self) -> str:
        return "\n".join([*aligned(self.table()), *self.notes()])

    def sqnr_table(self, limit: int | None = 12) -> str:
        """The SQNRs of compare(sqnr=True) in dB, as text: for each recipe the `limit` worst layers
        (None: all), with a star at values below the required minimum and a recipe that meets it."""
        return sqnr_table({row.recipe: row.sqnr for row in self.rows if row.sqnr}, limit)

    def suggest_overrides(self, recipe: str | None = None) -> Overrides:
        """A more precise recipe for each layer with inexact products, for `mixprec.convert(model,
        recipe, overrides=report.suggest_overrides())`.

        Inexact means an SQNR of y below 18 dB or of grad_weight below 17 dB. "fp8-rowwise" is
        suggested where it reaches both, measured on the same x, w and g, else "bf16". The result is
        a dict of {layer: recipe}; its `reasons` contain the measurements, and str() lists them.
        recipe: the row to use; None is the first measured FP8 one, else the first measured one.
        ValueError if nothing was measured (use compare(sqnr=True)), KeyError if there is no such
        row.
        """
        rows = [row for row in self.rows if row.sqnr]
        if recipe is not None:
            rows = [row for row in [self[recipe]] if row.sqnr]
        if not rows:
            which = "a recipe" if recipe is None else f"recipe {recipe!r}"
            raise ValueError(
                f"Report.suggest_overrides: {which} must have been measured to the end of its run "
                "by compare(sqnr=True), which measures layers with a recipe"
            )
        fp8 = [row for row in rows if "e4m3" in row.expected.get("forward", "")]
        return Overrides.of((fp8 or rows)[0].sqnr)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, dicts, numbers and strings; NaN and Inf as None."""
        names = ("unit", "loss_name", "loss_factor", "interrupted", "options", "environment")
        result = {name: getattr(self, name) for name in names}
        result |= {"table": self.table(), "notes": self.notes()}
        return finite(result | {"rows": [self._row_dict(row) for row in self.rows]})

    def _row_dict(self, row: Row) -> dict[str, Any]:
        modules = sorted({name for name, _, _ in row.gemms})
        loss = row.validation_loss
        return {
            "recipe": row.recipe,
            "status": row.status,
            "steps": row.steps,
            "validation_loss": loss,
            f"validation {self.loss_name}": None if loss is None else loss * self.loss_factor,
            "difference_to_fp32": self.difference(row),
            f"{self.unit}_per_second": row.speed,
            "parameter_bytes": row.parameter_bytes,
            "gradient_bytes": row.gradient_bytes,
            "optimizer_bytes": row.optimizer_bytes,
            "peak_bytes": row.peak_bytes,
            "saved_for_backward_bytes": row.saved_bytes,
            "skipped_steps": row.skipped_steps,
            "final_loss_scale": row.loss_scale,
            "gemms": row.gemm_counts(),
            "gemms_by_module": {name: row.gemm_counts(name) for name in modules},
            "sqnr": row.sqnr,
            "reseeded": row.reseeded,
            "data_crc32": row.data[-1] if row.data else None,
            "train_losses": row.losses,
            "step_seconds": row.seconds,
            "median_seconds_by_part": {k: statistics.median(v) for k, v in row.parts.items()},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to_dict() to `path` as JSON: the whole file or, with an OSError, nothing."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the training losses, and their difference to fp32, to an image file.

        The format follows the suffix of `path` (.png, .svg, .pdf). ImportError without matplotlib.
        Written atomically, as by `save`.
        """
        curves = [
            plotting.Curve(
                row.recipe,
                [x * self.loss_factor for x in row.losses],
                None if row.validation_loss is None else row.validation_loss * self.loss_factor,
                self.difference(row),
                row.reseeded,
            )
            for row in self.rows
            if row.losses
        ]
        figure = plotting.plot_losses(curves, self.loss_name, self._validated, self.chance())
        plotting.save(figure, path)
