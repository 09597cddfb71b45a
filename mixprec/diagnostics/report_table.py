"""The text of a Report: a table of at most 80 columns, and a line for what is not the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..amp.rules import power

if TYPE_CHECKING:
    from .report import Report, Row


def rows(report: Report) -> list[list[str]]:
    """The table as lists of strings, the header first."""
    loss = report.loss_name if report._validated else f"train {report.loss_name}"
    header = ["recipe", loss, "vs fp32", f"{report.unit}/s", "params", "grads", "optim", "saved"]
    on_gpu = any(row.peak_bytes is not None for row in report.rows)
    return [
        [*header, "peak"] if on_gpu else header,
        *([*_cells(report, row, on_gpu)] for row in report.rows),
    ]


def _cells(report: Report, row: Row, on_gpu: bool) -> Iterator[str]:
    loss, difference = report.loss(row), report.difference(row)
    yield row.recipe
    yield "-" if loss is None else f"{loss * report.loss_factor:.4f}"
    yield "-" if difference is None else f"{difference:+.2%}"
    yield "-" if row.speed is None else f"{row.speed:,.0f}"
    sizes = [row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.saved_bytes]
    yield from map(readable, [*sizes, row.peak_bytes] if on_gpu else sizes)


def notes(report: Report) -> list[str]:
    """A sentence for each recipe with a loss scale, with skipped steps, or that was not trained as
    long as the longest; and what another seed changes."""
    most = max((row.steps for row in report.rows), default=0)
    found = []
    for row in report.rows:
        said = []
        if row.status != "complete" or row.steps < most:
            said.append(f"{row.status}, {row.steps} of {most} steps")
        if row.skipped_steps or row.loss_scale is not None:
            said.append(f"{row.skipped_steps or 0} of {row.steps} steps skipped")
        if row.loss_scale is not None:
            said.append(f"loss scale {power(row.loss_scale)} at the end")
        if said:
            found.append(f"{row.recipe}: {', '.join(said)}")
    return found + _against_chance(report)


def _against_chance(report: Report) -> list[str]:
    """Which recipes differ from fp32 by less than another seed does."""
    if (chance := report.chance()) is None:
        return []
    again = " and ".join(row.recipe for row in report.rows if row.reseeded)
    smaller: list[str] = []
    larger: list[str] = []
    for row in report.rows:
        difference = report.difference(row)
        if difference is not None and row.recipe != "fp32" and not row.reseeded:
            (smaller if abs(difference) <= chance else larger).append(row.recipe)
    chance_or_not = "a larger one, which a single run cannot tell from chance"
    return [
        f"{again}: fp32 from another seed, which changes the loss by {chance:.2%}",
        *([f"{', '.join(smaller)}: within run-to-run noise"] if smaller else []),
        *([f"{', '.join(larger)}: {chance_or_not}"] if larger else []),
    ]


def aligned(table: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """The lines of a table, with a rule below its first row. left: the columns of text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:]]


def readable(n: int | None) -> str:
    """Bytes with three digits: 9.97 MB, 31.6 MB, 160 MB; "-" if unknown."""
    if n is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size * 0.9995:
            value = n / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{n} B"
