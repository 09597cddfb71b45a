"""What is wrong with the numbers of a step, in sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..stats.suggest import BARS
from .lost import Lost
from .op import PRODUCTS, Op, joined
from .sqnr_table import product

_UNDERFLOW, _OVERFLOW = 0.1, 1e-3  # shares of elements that are worth a sentence
_WORDS = {"x": "inputs", "w": "weights", "g": "gradients"}
# Errors of this multiple of what rounding explains are none of rounding: clean ops reach 1.5.
SUSPECT = 2.0


def collect(ops: Iterable[Op]) -> list[str]:
    """The worst first."""
    every = [(op, *item) for op in ops if op.kind in PRODUCTS for item in op.lost.items()]
    return [*_beyond(every), *_cut(every, "overflow", _OVERFLOW), *_below_bar(every),
            *_cut(every, "underflow", _UNDERFLOW)]  # fmt: skip


def notes(not_followed: Mapping[str, int]) -> list[str]:
    if not not_followed:
        return []
    return [f"Not computed again in FP32, and taken as they are: {joined(not_followed, 5)}."]


def _beyond(ops: list[tuple[Op, str, Lost]]) -> list[str]:
    found: dict[str, float] = {}

    def note(said: str, why: str, beyond: float) -> None:
        if beyond > SUSPECT:
            if math.isinf(beyond):
                sentence = f"{said} has Inf or NaN where FP32 has none"
            else:
                sentence = f"{said} is off by {beyond:.3g} times what {why} explains"
            found[sentence] = beyond

    for op, name, lost in ops:
        note(f"{op.where}, {product(op, name)}", "rounding", lost.beyond)
        for role, operand in lost.operands.items():
            said = f"{op.where}: the cast of its {_WORDS[role]} to {op.precision}"
            if not operand.infinite:  # that has a sentence with their share
                note(said, "the format", operand.beyond)
    return sorted(found, key=lambda sentence: -found[sentence])


def _cut(ops: list[tuple[Op, str, Lost]], what: str, least: float) -> list[str]:
    """Elements that become 0, or Inf or the largest value."""
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for op, _, lost in ops:
        for role, operand in lost.operands.items():
            share = getattr(operand, what) / max(operand.elements, 1)
            if share >= least or (what == "overflow" and operand.infinite):
                group = shares[role, op.precision]
                group[op.where] = max(group.get(op.where, 0.0), share)
    found = []
    for (role, precision), names in shares.items():
        ranked = sorted(names, key=lambda name: -names[name])
        most = 100 * max(names.values())
        share = f"{most:.1f}%" if most >= 0.1 else f"{most:.2g}%"
        found.append(f"{joined(ranked, 3)}: {share} of the {_WORDS[role]} {what} in {precision}")
    return found


def _below_bar(ops: list[tuple[Op, str, Lost]]) -> list[str]:
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for op, name, lost in ops:
        bar, own = BARS.get(name), lost.own
        if bar is not None and own is not None and lost.beyond <= SUSPECT and own < bar:
            groups[name, op.precision][op.where] = own
    return [
        f"{joined(sorted(names, key=lambda n: names[n]), 3)}: {name} in {precision} has an SQNR "
        f"of {min(names.values()):.1f} dB, below {BARS[name]:g}"
        for (name, precision), names in groups.items()
    ]
