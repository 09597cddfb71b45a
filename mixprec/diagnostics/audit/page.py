"""An audit as one HTML file that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from torch import nn

from ..stats.suggest import BARS
from .lost import Lost
from .op import PRODUCTS, SHORT, STEP, Op, bits, readable
from .sqnr_table import decibels, product

if TYPE_CHECKING:
    from .report import Audit

_WIDE, _HALF = ("#8c2d04", "#d94801"), ("#2171b5", "#6baed6")  # fp64, fp32; bf16, fp16
_COLORS = {"fp64": _WIDE[0], "fp32": _WIDE[1], "bf16": _HALF[0], "fp16": _HALF[1]}
_NARROW = {8: "#238b45", 6: "#41ab5d", 4: "#74c476"}


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


def _own(lost: Lost) -> float:
    """In dB; -inf where it is not a number."""
    if lost.own is None:
        return math.inf
    return -math.inf if math.isnan(lost.own) else lost.own


def loss_color(own: float) -> str:
    """Of an SQNR: red below the bars of FP8's products, orange within 6 dB of them."""
    bar = max(BARS.values())
    return "#b2182b" if own < bar else "#ef8a62" if own < bar + 6 else "#67a9cf"


def shown(own: float) -> str:
    return "not finite" if math.isinf(own) else f"{own:.1f} dB"


def parts(flops: Mapping[str, int]) -> list[tuple[str, float, float, str]]:
    """Of a stacked bar: name, left edge and width in percent, color."""
    total, left, found = sum(flops.values()), 0.0, []
    for name, n in sorted(flops.items(), key=lambda item: -item[1]):
        width = 100 * n / total
        found.append((name, left, width, color(name)))
        left += width
    return found


def short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


def html(audit: Audit, model: nn.Module, title: str) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(parts=parts, readable=readable, color=color, short=short)
    environment.globals.update(loss_color=loss_color, shown=shown, inf=math.inf)
    environment.globals.update(decibels=decibels, product=product)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(
        title=title,
        audit=audit,
        root=tree(audit.ops, model),
        ops=[op for op in audit.ops if op.kind in PRODUCTS],
        sums=[op for op in audit.ops if op.kind not in PRODUCTS],
    )
