"""An audit as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..writers import SHORT, aligned, decibels, joined, prefixed
from .records import AGAIN, FORWARD, PRODUCTS, Lost, Op, flops_by, product_name

_ROLES = ("x", "w", "g")


def summary(ops: Iterable[Op]) -> str:
    """The shares of precisions, and of what set them."""
    ops = list(ops)
    precisions = flops_by(lambda op: op.precision, ops)
    total = sum(precisions.values())
    if not total:
        return "no products"
    parts = [
        ", ".join(f"{n / total:.1%} {name}" for name, n in flops.items())
        for flops in (precisions, flops_by(lambda op: op.decided, ops))
    ]
    again = sum(op.flops for op in ops if op.phase == AGAIN)
    again_share = f", {again / total:.1%} computed again in backward" if again else ""
    return f"{prefixed(total)}FLOP{again_share}: {parts[0]}. Set by: {parts[1]}"


def table(ops: Iterable[Op], most: int) -> str:
    """A line for each module, or line of the program, and kind of op, the one with most FLOPs
    first."""
    lines = [["module", "op", "forward", "backward", "sum", "set by", "FLOP", "again"]]
    groups: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        if op.kind in PRODUCTS:
            groups.setdefault((op.where, op.kind), []).append(op)
    ranked = sorted(groups.items(), key=lambda item: -sum(op.flops for op in item[1]))
    for (where, kind), group in ranked[:most]:
        lines.append([
            where,
            kind,
            *(joined(op.precision for op in group if (op.phase == FORWARD) == forward)
              for forward in (True, False)),
            joined(SHORT.get(op.accumulation, op.accumulation) for op in group),
            joined(op.decided for op in group),
            prefixed(sum(op.flops for op in group if op.phase != AGAIN)),
            prefixed(sum(op.flops for op in group if op.phase == AGAIN)) or "-",
        ])  # fmt: skip
    return _with_rest(aligned(lines), len(ranked) - most)


def _with_rest(lines: list[str], rest: int) -> str:
    return "\n".join(lines + ([f"and {rest} more"] if rest > 0 else []))


def sqnr_table(ops: Iterable[Op], most: int | None) -> str:
    """A line for each module and product of it, the one that loses most first."""
    losses: dict[tuple[str, str, str], Lost] = {}
    for op in ops:
        for name, lost in op.lost.items() if op.kind in PRODUCTS else ():
            losses.setdefault((op.where, product_name(op, name), op.precision), Lost()).add(lost)
    ranked = sorted(losses.items(), key=lambda item: _own(item[1]))
    others = list(dict.fromkeys(name for _, lost in ranked for name in lost.what_if))
    heads = ["module", "product", "precision", "own", "total", *_ROLES, "underflow", "overflow"]
    lines = [[*heads, *(f"in {name}" for name in others)]]
    for (where, what, precision), lost in ranked[:most]:
        lines.append([where, what, precision, *_cells(lost, others)])
    if len(lines) == 1:
        return "no product rounds its operands or its result"
    text = ["SQNR in dB against FP32", *aligned(lines, left=(0, 1, 2))]
    return _with_rest(text, len(ranked) - len(ranked[:most]))


def _cells(lost: Lost, others: Iterable[str]) -> Iterator[str]:
    yield _db(lost.own)
    yield _db(lost.total)
    for role in _ROLES:
        yield _db(lost.operands[role].sqnr) if role in lost.operands else "-"
    for name in ("underflow", "overflow"):
        yield _worst(lost, name)
    for recipe in others:
        yield _db(lost.sqnr_if(recipe))


def _worst(lost: Lost, name: str) -> str:
    """The role with the largest share of elements that became 0, or Inf or saturated."""
    shares = {r: getattr(o, name) / o.elements for r, o in lost.operands.items() if o.elements}
    role = max(shares, key=lambda r: shares[r], default=None)
    return "-" if role is None or not shares[role] else f"{role} {shares[role]:.2%}"


def _db(value: float | None) -> str:
    return decibels(None if value == math.inf else value)  # nothing is lost


def _own(lost: Lost) -> float:
    """In dB, to sort by: -inf where it is not a number, inf where it is unknown."""
    if lost.own is None:
        return math.inf
    return -math.inf if math.isnan(lost.own) else lost.own
