"""What the products of a step have lost, as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..report_table import aligned
from .lost import RESULT, Lost
from .op import PRODUCTS, Op

_ROLES = ("x", "w", "g")


def table(ops: Iterable[Op], most: int | None) -> str:
    """A line for each module and product of it, the one that loses most first."""
    found: dict[tuple[str, str, str], Lost] = {}
    for op in ops:
        for name, lost in op.lost.items() if op.kind in PRODUCTS else ():
            found.setdefault((op.where, product(op, name), op.precision), Lost()).add(lost)
    ranked = sorted(found.items(), key=lambda item: _decibels(item[1].own))
    others = list(dict.fromkeys(name for _, lost in ranked for name in lost.what_if))
    heads = ["module", "product", "precision", "own", "total", *_ROLES, "underflow", "overflow"]
    lines = [[*heads, *(f"in {name}" for name in others)]]
    for (where, what, precision), lost in ranked[:most]:
        lines.append([where, what, precision, *_cells(lost, others)])
    if len(lines) == 1:
        return "no product rounds its operands or its result"
    text = ["SQNR in dB against FP32", *aligned(lines, left=(0, 1, 2))]
    rest = len(ranked) - len(ranked[:most])
    return "\n".join(text + ([f"and {rest} more"] if rest else []))


def product(op: Op, name: str) -> str:
    """What `name` of op.lost is."""
    return f"{op.kind}, {op.phase}" if name == RESULT else name


def _cells(lost: Lost, others: Iterable[str]) -> Iterator[str]:
    yield decibels(lost.own)
    yield decibels(lost.total)
    for role in _ROLES:
        yield decibels(lost.operands[role].sqnr) if role in lost.operands else "-"
    for name in ("underflow", "overflow"):
        yield _worst(lost, name)
    for recipe in others:
        yield decibels(lost.sqnr_if(recipe))


def _worst(lost: Lost, name: str) -> str:
    """The role with the largest share of elements that became 0, or Inf or saturated."""
    shares = {r: getattr(o, name) / o.elements for r, o in lost.operands.items() if o.elements}
    role = max(shares, key=lambda r: shares[r], default=None)
    return "-" if role is None or not shares[role] else f"{role} {shares[role]:.2%}"


def decibels(value: float | None) -> str:
    if value is None or value == math.inf:
        return "-"
    return f"{round(value, 1) + 0.0:.1f}"  # no -0.0


def _decibels(value: float | None) -> float:
    if value is None:
        return math.inf
    return -math.inf if math.isnan(value) else value
