"""The result of a run as a table; with rich if it is installed, in plain text otherwise."""

from __future__ import annotations

import sys
from typing import Any

from .registry import FLOOR, quantity

HEADER = ("row", "ours", "rate", "of a copy", "best rival", "", "result", "target", "met")


def duration(seconds: float) -> str:
    """Three figures and a unit: 7.23 us, 812 us, 13.3 ms, 1.25 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate(row: dict[str, Any]) -> str:
    """Work per second: GFLOP/s where the row counts operations, else GB/s, else nothing."""
    seconds = row["median"]["ours"]
    for key, unit in (("flops", "GFLOP/s"), ("bytes", "GB/s")):
        if row[key]:
            return f"{row[key] / seconds / 1e9:.3g} {unit}"
    return ""


def of_a_copy(row: dict[str, Any]) -> str:
    """The speed as a share of that of a plain copy of the same bytes, measured beside it."""
    floor = row["median"].get(FLOOR)
    return "" if floor is None else f"{floor / row['median']['ours']:.0%}"


def target(row: dict[str, Any]) -> str:
    want = row["target"]
    if want is None:
        return ""
    return f"{'>=' if want['at_least'] else '<='} {quantity(want['value'], want['unit'])}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table, in the order of HEADER."""
    if row["status"] != "ok":
        return row["name"], "", "", "", "", "", row["status"].upper(), target(row), "-"
    rival = row["best_rival"]
    return (
        row["name"],
        duration(row["median"]["ours"]),
        rate(row),
        of_a_copy(row),
        duration(row["median"][rival]) if rival else "",
        rival or "",
        quantity(row["figure"], row["target"]["unit"]),
        target(row),
        "yes" if row["met"] else "no",
    )


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row without figures, saying why."""
    return [f"{r['name']}: {r['status'].upper()}: {r['reason']}" for r in rows if r["reason"]]


def summary(rows: list[dict[str, Any]]) -> str:
    """n of N targets met; a wrong or failed row counts as missed, one not measured not at all."""
    counted = [row for row in rows if row["status"] != "not measured"]
    return f"{sum(row['met'] for row in counted)} of {len(counted)} targets met"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, the remarks and, as the last line, the summary."""
    lines = [cells(row) for row in rows]
    if not _show_rich(lines):
        for line in plain(lines):
            print(line)
    for line in [*remarks(rows), summary(rows)]:
        print(line)


def plain(lines: list[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> list[str]:
    """Aligned columns, two spaces apart."""
    everything = [header, *lines]
    widths = [max(len(line[i]) for line in everything) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in everything
    ]


def _show_rich(lines: list[tuple[str, ...]]) -> bool:
    """Print with rich; False where it is not installed or the output is no terminal."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, justify in zip(HEADER, ("left", *["right"] * 4, "left", *["right"] * 3), strict=True):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    styles = {"yes": "green", "no": "yellow", "-": "red"}
    for line in lines:
        table.add_row(*line, style=styles[line[-1]] if line[-1] != "yes" else None)
    Console().print(table)
    return True
