"""The layers whose measured SQNRs are too low, and the recipes to use instead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...recipes import ROLES
from ..report_table import aligned

PRODUCTS = ("y", "grad_input", "grad_weight")
Sqnr = dict[str, float | None]

# The SQNR in dB that an FP8 product should reach: the thresholds of torchao's tests.
BARS = {"y": 18.0, "grad_weight": 17.0}
REMEDIES = ("fp8-rowwise", "bf16")  # in this order


def below_bar(sqnr: Sqnr) -> dict[str, float]:
    """The products below their threshold, or with Inf or NaN where FP32 has none."""
    found = {name: sqnr.get(name) for name in BARS}
    return {n: value for n, value in found.items() if value is not None and not value >= BARS[n]}


Measured = Mapping[str, Mapping[str, Any]]  # by layer, as `model_sqnr` returns it
_NAME = 26


class Overrides(dict[str, str]):
    """{layer: recipe}, as mixprec.convert takes it; `reasons` explains each, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    @staticmethod
    def of(measured: Measured) -> Overrides:
        result = Overrides()
        for layer, row in measured.items():
            if row["remedy"] is not None:
                result[layer] = row["remedy"]["recipe"]
                result.reasons[layer] = _reason(row)
        return result

    def __str__(self) -> str:
        lines = [f"{n or '(the model)'}: {self[n]}: {why}" for n, why in self.reasons.items()]
        return "\n".join(lines) or "no layer is below its bar"


def _reason(row: Mapping[str, Any]) -> str:
    low, remedy = below_bar(dict(row)), row["remedy"]
    parts = [
        f"{name} has {_db(value)} dB in {row['recipe']}, below {BARS[name]:g}, "
        f"and {_db(remedy.get(name))} in {remedy['recipe']}"
        for name, value in low.items()
    ]
    return "; ".join(parts)


def _db(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 1) + 0.0:.1f}"  # no -0.0


def _margin(row: Mapping[str, Any]) -> float:
    """How far the worst product is above its threshold; -Inf if one is not finite."""
    margins = [row[n] - bar for n, bar in BARS.items() if row.get(n) is not None]
    return min((-math.inf if math.isnan(m) else m for m in margins), default=math.inf)


def sqnr_table(measured: Mapping[str, Measured], limit: int | None) -> str:
    """The layers of each recipe, worst first, as text."""
    header: tuple[str, ...] = ("recipe", "layer", *ROLES, "y", "grad_in", "grad_w", "instead")
    cells: list[tuple[str, ...]] = [header]
    left_out = 0
    for recipe, layers in measured.items():
        order = sorted(layers, key=lambda name: _margin(layers[name]))
        left_out += len(order) - len(order[:limit])
        cells += [(recipe, *_cells(name, layers[name])) for name in order[:limit]]
    lines = aligned(cells, left=(0, 1, len(header) - 1))
    if left_out:
        lines.append(f"... and {left_out} more, all with a larger margin")
    bars = " and ".join(f"{bar:g} for {name}" for name, bar in BARS.items())
    title = f"SQNR in dB against FP32, worst layers first; * is below the bar: {bars}"
    return "\n".join([title, *lines])


def _cells(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    low = below_bar(dict(row))
    name = name or "(the model)"
    yield name if len(name) <= _NAME else "..." + name[3 - _NAME :]
    for column in (*ROLES, *PRODUCTS):
        yield _db(row.get(column)) + ("*" if column in low else "")
    yield row["remedy"]["recipe"] if row["remedy"] else ""
