"""An audit as text, and as one HTML file that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from torch import nn

from ..writers import SHORT, aligned, decibels, joined, prefixed
from .records import AGAIN, BARS, FORWARD, PRODUCTS, STEP, Lost, Op, bits, flops_by, product_name

_ROLES = ("x", "w", "g")
_WIDE, _HALF = ("#8c2d04", "#d94801"), ("#2171b5", "#6baed6")  # fp64, fp32; bf16, fp16
_COLORS = {"fp64": _WIDE[0], "fp32": _WIDE[1], "bf16": _HALF[0], "fp16": _HALF[1]}
_NARROW = {8: "#238b45", 6: "#41ab5d", 4: "#74c476"}


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


@dataclass
class Node:
    """A module, or code outside of the model: its FLOPs by precision, with those of what it
    contains. place: its number among the modules of the model; worst: the lowest SQNR of an op's
    own, in dB."""

    name: str
    place: int
    flops: Counter[str] = field(default_factory=Counter)
    children: dict[str, Node] = field(default_factory=dict)
    worst: float = math.inf

    @property
    def total(self) -> int:
        return sum(self.flops.values())


def color(precision: str) -> str:
    """Of a precision; grey where operands differ."""
    return _COLORS.get(precision) or _NARROW.get(bits(precision), "#969696")


def tree(ops: Iterable[Op], model: nn.Module) -> Node:
    places = {name: i for i, (name, _) in enumerate(model.named_modules())}
    root = Node("", 0)
    for op in ops:
        if not op.flops or op.phase == STEP:
            continue
        path = ["code outside of the model", op.line] if op.module is None else ["model"]
        if op.module:
            path += op.module.split(".")
        node = root
        for i, part in enumerate(path):
            place = len(places) if op.module is None else places.get(".".join(path[1 : i + 1]), 0)
            node = node.children.setdefault(part, Node(part, place))
            node.flops[op.precision] += op.flops
            node.worst = min(node.worst, *(own for own in map(_own, op.lost.values())), math.inf)
    return root


def loss_color(own: float) -> str:
    """Of an SQNR: red below the bars of FP8's products, orange within 6 dB of them."""
    bar = max(BARS.values())
    return "#b2182b" if own < bar else "#ef8a62" if own < bar + 6 else "#67a9cf"


def shown(own: float) -> str:
    return "not finite" if math.isinf(own) else f"{own:.1f} dB"


def parts(flops: Mapping[str, int]) -> list[tuple[str, float, float, str]]:
    """Of a stacked bar: name, left edge and width in percent, color."""
    total, left, bars = sum(flops.values()), 0.0, []
    for name, n in sorted(flops.items(), key=lambda item: -item[1]):
        width = 100 * n / total
        bars.append((name, left, width, color(name)))
        left += width
    return bars


def html(
    ops: list[Op],
    model: nn.Module,
    title: str,
    *,
    findings: list[str],
    notes: list[str],
    has_losses: bool,
) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals.update(
        parts=parts, readable=prefixed, color=color, short=lambda dtype: SHORT.get(dtype, dtype),
        loss_color=loss_color, shown=shown, inf=math.inf, decibels=_db, product=product_name,
    )  # fmt: skip
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(
        title=title,
        summary=summary(ops),
        findings=findings,
        notes=notes,
        precisions=list(flops_by(lambda op: op.precision, ops)),
        has_losses=has_losses,
        root=tree(ops, model),
        ops=[op for op in ops if op.kind in PRODUCTS],
        sums=[op for op in ops if op.kind not in PRODUCTS],
    )
