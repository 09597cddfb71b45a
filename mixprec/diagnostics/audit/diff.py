"""Where two steps part: the first op whose difference rounding does not explain."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..report_table import aligned
from .lost_findings import SUSPECT
from .trace import Point, distance

# Steps in FP32 that compute the same part by less than this, or by less than so many times what
# they have parted by before, or what the rounding of weights has. Those of 12 families of models
# part by 2e-6, random programs by 4e-5, where the gradients of attention cancel; and from weights
# in bf16, which change the sign of some inputs of a ReLU, by 17 times more than before.
_SAME = 1e-4
_GROWS = 30.0
_ROUNDING = 12**-0.5  # the root mean square of a rounding, in units of the spacing


@dataclass
class Place:
    """An op that both steps have, and by how much their operands and results are apart, each in
    FP32, as a part of their norm; beyond: the errors of the op itself, in the one step and in the
    other, as multiples of what rounding explains."""

    module: str
    phase: str
    op: str
    inputs: dict[str, float]
    result: float
    beyond: tuple[float, float]

    def __str__(self) -> str:
        where = self.module or "the model"
        return where if self.op == self.phase else f"{where}, {self.op} in {self.phase}"


class Diff:
    """What `Audit.diff` found. str() is `said` and a table of the places around `first`.

    first: the Place where the two steps part, or None; said: a sentence; places: all that both
    have, in the order of the first; missing: ops that only one of them has.
    """

    def __init__(self, a: list[Point], b: list[Point]) -> None:
        there = {point.key: point for point in b}
        turns, others = (Counter(point.key[:3] for point in some) for some in (a, b))
        common = [
            (point, there[point.key])
            for point in a
            if point.key in there and turns[point.key[:3]] == others[point.key[:3]]
        ]
        unknown = next((one.after or two.after for one, two in common if one.after + two.after), "")
        self.missing = len(a) + len(b) - 2 * len(common)
        missing = _first_missing(common, a, b)
        common = [(one, two) for one, two in common if not (one.after or two.after)]
        if not common and not unknown:
            raise ValueError(f"diff: the two steps have no op in common: {missing}")
        self.places: list[Place] = []
        self.first: Place | None = None
        self.said = "they part nowhere by more than rounding explains"
        usual = _SAME / _GROWS
        for one, other in common:
            place = _place(one, other)
            self.places.append(place)
            usual = max(usual, _ROUNDING * abs(one.made - other.made))
            if self.first is None and (said := _said(place, one, other, _GROWS * usual)):
                self.first, self.said = place, said
            usual = max(usual, place.result)  # operands may be rotated, as those of nvfp4
        self._at = 0 if self.first is None else self.places.index(self.first)
        if unknown:
            self.said += f"; what runs after {unknown} is not compared"
        elif self.missing:
            self.said += f"; {self.missing} ops are in one of them only: {missing}"

    def __str__(self) -> str:
        return f"{self.said}\n\n{self.table()}"

    def amplifiers(self, most: int = 5) -> list[tuple[Place, float]]:
        """The places whose results are further apart than their operands, in relative terms, with
        the factor, the largest first; at most `most` of them."""
        found = []
        for place in self.places:
            before = max(place.inputs.values(), default=0.0)
            if 0 < before < place.result:
                found.append((place, place.result / before))
        return sorted(found, key=lambda one: -one[1])[:most]

    def table(self, around: int | None = 6) -> str:
        """The places around the first one, or all."""
        start = 0 if around is None else max(self._at - around, 0)
        stop = None if around is None else self._at + around + 1
        lines = [["", "module", "op", "phase", "inputs apart", "results apart", "a", "b"]]
        for i, place in enumerate(self.places[start:stop], start):
            is_first = self.first is not None and i == self._at
            worst = max(place.inputs.values(), default=0.0)
            errors = (f"{beyond:.2g}x" for beyond in place.beyond)
            lines.append([
                ">" if is_first else "", place.module or "the model", place.op, place.phase,
                f"{worst:.1e}", f"{place.result:.1e}", *errors,
            ])  # fmt: skip
        return "\n".join(aligned(lines, left=(0, 1, 2, 3)))


def _place(a: Point, b: Point) -> Place:
    inputs = {
        role: distance(a.inputs[role], b.inputs[role]) for role in a.inputs if role in b.inputs
    }
    return Place(
        a.module, a.phase, a.op, inputs, distance(a.result, b.result), (a.beyond, b.beyond)
    )


def _said(place: Place, a: Point, b: Point, least: float) -> str:
    """Why two steps part at a place; empty if they do not."""
    if place.result > least:
        role = max(place.inputs, key=lambda role: place.inputs[role])
        if place.inputs[role] > least:
            return f"{place}: they part before it: its {role} differs by {place.inputs[role]:.2%}"
        # Where the terms of a sum cancel, a small difference of operands is a large one of results.
        if place.result > _GROWS * place.inputs[role] * _condition(a):
            apart = f"{place.result:.2%}"
            return f"{place}: they part here: of equal operands its result differs by {apart}"
    for name, point in (("first", a), ("second", b)):
        if point.beyond > SUSPECT:
            wrong = f"{point.wrong} is off by {point.beyond:.3g} times what rounding explains"
            if math.isinf(point.beyond):
                wrong = f"{point.wrong} has Inf or NaN where FP32 has none"
            return f"{place}: in the {name} step {wrong}"
    return ""


def _condition(point: Point) -> float:
    """|a| |b| / |a @ b| of a product, in Frobenius norms; 1 of other ops."""
    norms = [math.hypot(*values) for values in point.inputs.values()]
    size = math.hypot(*point.result)
    return max(norms[0] * norms[1] / size, 1.0) if len(norms) == 2 and size > 0 else 1.0


def _first_missing(common: list[tuple[Point, Point]], *steps: list[Point]) -> str:
    for place, (name, points) in enumerate(zip(("first", "second"), steps, strict=True)):
        found = {id(pair[place]) for pair in common}
        for point in points:
            if id(point) not in found:
                where = point.module or "the model"
                return f"{where}, {point.op} in {point.phase}, of the {name}"
    return "none"


@torch.no_grad()
def _perturbed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for i, p in enumerate(other.parameters()):
        if p.is_floating_point():
            generator = torch.Generator(p.device).manual_seed(i)
            away = torch.rand(p.shape, generator=generator, device=p.device) - 0.5
            p.mul_(1 + 2.0**-7 * away)
    return other


def bisect(
    model_a: nn.Module,
    model_b: nn.Module | None,
    *batch: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    perturb: bool = False,
) -> Diff:
    """Find where two models part that should compute the same: before and after mixprec.convert,
    in FP32 and in bf16, of two versions of a program.

        print(mixprec.bisect(model, mixprec.convert(copy.deepcopy(model), "fp8"), tokens))

    One forward and backward pass of each, as in `mixprec.audit` with sqnr=True, from the same
    random state, leaves both models as they were. What a model would compute in FP32 is compared
    with the same of the other, so that rounding does not count, and each op with what it would
    have returned in FP32, so that rounding that is too coarse does. See `Diff`.

    perturb: with None for model_b, a copy of model_a stands for it, each weight of which is off by
    up to 2^-8 of itself, at random: `Diff.amplifiers` has what makes more of a rounding error.

    batch, loss: as in `mixprec.audit`. Ops are compared by the module that owns them, so that both
    models need the same names. ValueError if they have no op in common.
    """
    from .report import audit

    if (model_b is None) != perturb:
        raise TypeError("bisect: model_b must be None with perturb=True, and a model without it")
    if model_b is None:
        model_b = _perturbed(model_a)
    first = audit(model_a, *batch, loss=loss, sqnr=True)
    return first.diff(audit(model_b, *batch, loss=loss, sqnr=True))
