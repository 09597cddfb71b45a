"""What a step in FP32 has at each op, in a few numbers, and where two steps diverge.

A sketch of n elements is R [4, n / 127] @ x [n / 127, 127], R of random signs: the squared distance
of two sketches, over 4, estimates that of the tensors (Alon, Matias and Szegedy, 1996).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..writers import aligned
from . import reference
from .ops import Call
from .records import PRODUCTS, ROLES_OF, WORDS, Lost, product_of, unexplained
from .reference import is_float, widened
from .shadow import Ran, Shadow, written_by

_DRAWS, _COLUMNS, _ROWS = 4, 127, 4096  # a prime: no column of a matrix is a column of this one
_BIASES = {torch.ops.aten.addmm: "self"}
# Steps in FP32 that compute the same differ by less than this, or by less than so many times what
# they differ by before, or what the rounding of weights has. Those of 12 families of models
# differ by 2e-6, random programs by 4e-5, where the gradients of attention cancel; and from weights
# in bf16, which change the sign of some inputs of a ReLU, by 17 times more than before.
_SAME = 1e-4
_GROWS = 30.0
_ROUNDING = 12**-0.5  # the root mean square of a rounding, in units of the spacing


@dataclass
class Point:
    """Of an op in a step: module, phase and op, the how many of those that are the same in these.

    inputs: sketches of its operands in a step in FP32, by role; result: that of the result; wrong:
    what rounding does not explain of the op itself, in a sentence; beyond: by which factor; own:
    the op's own error, as a part of its result; made: the spacing at 1 of the formats that weights
    and inputs have so far, 0 for FP32; after: an op before it that was not computed again.
    """

    module: str
    phase: str
    op: str
    turn: int
    size: int
    inputs: dict[str, list[float]] = field(default_factory=dict)
    result: list[float] = field(default_factory=list)
    wrong: str = ""
    beyond: float = 0.0
    own: float = 0.0
    made: float = 0.0
    after: str = ""

    @classmethod
    def of_json(cls, row: dict[str, Any]) -> Point:
        """As `Audit.save` has written it, null for what is not finite."""
        values: dict[str, Any] = {n: math.inf if v is None else v for n, v in row.items()}
        point = cls(**values)
        for numbers in (*point.inputs.values(), point.result):
            numbers[:] = [math.inf if n is None else n for n in numbers]
        return point

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        module = self.module.replace("_orig_mod.", "")  # what torch.compile puts before it
        return module, self.phase, self.op, self.turn, self.size


@functools.cache
def _signs(block: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(block)
    return torch.randint(0, 2, (_DRAWS, _ROWS), generator=generator).float() * 2 - 1


def sketch(x: torch.Tensor) -> list[float]:
    """Of the values in the order of the elements."""
    flat = x.detach().reshape(-1)
    flat = flat.float() if flat.dtype != torch.float32 else flat
    full = flat.numel() // _COLUMNS
    total = flat.new_zeros((_DRAWS, _COLUMNS))
    rows = flat[: full * _COLUMNS].view(-1, _COLUMNS)
    for i, part in enumerate(rows.split(_ROWS)):
        total += _signs(i)[:, : part.shape[0]].to(part.device) @ part
    rest = flat[full * _COLUMNS :]
    last = _signs(full // _ROWS)[:, full % _ROWS : full % _ROWS + 1].to(flat.device)
    total[:, : rest.numel()] += last * rest
    numbers: list[float] = total.flatten().tolist()
    return numbers


def distance(a: list[float], b: list[float]) -> float:
    """Of two sketches, as a part of the larger one's norm; 0 where both are 0 or one is empty, inf
    if one is not finite."""
    if not a or not b:
        return 0.0
    x, y = (torch.tensor(s, dtype=torch.float64) for s in (a, b))
    size = torch.maximum(x.norm(), y.norm())
    if not bool(torch.isfinite(size)):
        return 0.0 if bool(torch.equal(torch.isfinite(x), torch.isfinite(y))) else float("inf")
    return float((x - y).norm() / size) if size > 0 else 0.0


class Points(list[Point]):
    """Those of a step, in the order in which their ops ran."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: Counter[tuple[str, str, str]] = Counter()

    def record(
        self,
        shadow: Shadow,
        module: str,
        phase: str,
        call: Call,
        ran: Ran | None,
        lost: Mapping[str, Lost],
    ) -> None:
        """After a product, a convolution, attention or an RNN; other ops have no point."""
        listed, given, results = call.listed, call.given, call.results
        if listed is None or listed.kind not in PRODUCTS or not (results and is_float(results[0])):
            return
        operands = [given[name] for name in listed.operands]
        if not all(isinstance(t, torch.Tensor) and is_float(t) for t in operands):
            return
        roles = [shadow.roles.get(t) or "x" for t in operands]
        is_ours = call.func.namespace == "mixprec"
        values = [  # in a step in FP32
            shadow.of_step(
                given[name], functools.partial(reference.decoded, given, name) if is_ours else None
            )
            for name in listed.operands
        ]
        results_in_fp32 = [] if ran is None else [value for value in ran.total if value is not None]
        if not results_in_fp32:
            results_in_fp32 = [widened(t) for t in results if is_float(t)]
        result = results_in_fp32[0]
        if listed.kind in ("attention", "rnn"):  # of some of its gradients nothing may be left
            result = torch.cat([value.reshape(-1) for value in results_in_fp32])
        bias = given.get(_BIASES.get(call.func.overloadpacket, "bias"))
        if bias is not None and bias.dim() == 1 and listed.kind == "product":
            result = result - shadow.of_step(bias)  # other code of the same layer adds it later
        is_product = listed.kind == "product" and [t.dim() > 1 for t in operands] == [True, True]
        name = product_of(roles) if is_product else None
        if name is not None and tuple(roles) != ROLES_OF[name] and result.dim() == 2:
            roles.reverse()
            values = [t.transpose(-1, -2) for t in reversed(values)]
            result = result.t()
        if name in ("y", "grad_weight"):  # [N, K] and [M, N], as they are in memory
            at = 1 if name == "y" else 0
            values[at] = values[at].transpose(-1, -2)
        place = module, phase, name or listed.kind
        point = Point(*place, self._turns[place], result.numel())
        self._turns[place] += 1
        self.append(point)
        for role, value in zip(roles, values, strict=True):
            point.inputs.setdefault(WORDS[role], sketch(value))
        if not written_by(call):  # else with what was there before
            point.result = sketch(result)
        point.made, point.after = shadow.made, next(iter(shadow.not_followed), "")
        for one in lost.values():
            # What is least explained by rounding: the op, or the cast of an operand.
            errors = [(one.beyond, "what it computes of its operands")]
            for role, operand in one.operands.items():
                errors.append((operand.beyond, f"the cast of its {WORDS[role]}"))
            beyond, wrong = max(errors)
            if beyond >= point.beyond:
                point.beyond, point.wrong = beyond, wrong
                point.own = math.sqrt(one.own_noise / one.own_signal) if one.own_signal else 0.0


@dataclass
class Place:
    """An op that both steps have, and by how much their operands and results differ, each in
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

    first: the Place where the two steps diverge, or None; said: a sentence; places: all that both
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
        unknown = next(
            (one.after or two.after for one, two in common if one.after or two.after), ""
        )
        self.missing = len(a) + len(b) - 2 * len(common)
        missing = _first_missing(common, a, b)
        common = [(one, two) for one, two in common if not (one.after or two.after)]
        if not common and not unknown:
            raise ValueError(f"diff: the two steps have no op in common: {missing}")
        self.places: list[Place] = []
        self.first: Place | None = None
        self.said = "the steps diverge nowhere by more than rounding explains"
        usual = _SAME / _GROWS
        for one, other in common:
            place = Place(
                one.module,
                one.phase,
                one.op,
                {
                    r: distance(s, other.inputs[r])
                    for r, s in one.inputs.items()
                    if r in other.inputs
                },
                distance(one.result, other.result),
                (one.beyond, other.beyond),
            )
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

    def table(self, around: int | None = 6) -> str:
        """The places around the first one, or all."""
        start = 0 if around is None else max(self._at - around, 0)
        stop = None if around is None else self._at + around + 1
        lines = [["", "module", "op", "phase", "input difference", "result difference", "a", "b"]]
        for i, place in enumerate(self.places[start:stop], start):
            is_first = self.first is not None and i == self._at
            worst = max(place.inputs.values(), default=0.0)
            errors = (f"{beyond:.2g}x" for beyond in place.beyond)
            lines.append([
                ">" if is_first else "", place.module or "the model", place.op, place.phase,
                f"{worst:.1e}", f"{place.result:.1e}", *errors,
            ])  # fmt: skip
        return "\n".join(aligned(lines, left=(0, 1, 2, 3)))


def _said(place: Place, a: Point, b: Point, least: float) -> str:
    """Why two steps diverge at a place; empty if they do not."""
    if place.result > least:
        role = max(place.inputs, key=lambda role: place.inputs[role])
        if place.inputs[role] > least:
            share = f"{place.inputs[role]:.2%}"
            return f"{place}: the steps diverge upstream: its {role} differs by {share}"
        # Where the terms of a sum cancel, a small difference of operands is a large one of results.
        if place.result > _GROWS * place.inputs[role] * _condition(a):
            share = f"{place.result:.2%}"
            return (
                f"{place}: the steps diverge here: of equal operands its result differs by {share}"
            )
    for name, point in (("first", a), ("second", b)):
        if wrong := unexplained(point.wrong, point.beyond):
            return f"{place}: in the {name} step {wrong}"
    return ""


def _condition(point: Point) -> float:
    """|a| |b| / |a @ b| of a product, in Frobenius norms; 1 of other ops."""
    norms = [math.hypot(*values) for values in point.inputs.values()]
    size = math.hypot(*point.result)
    return max(norms[0] * norms[1] / size, 1.0) if len(norms) == 2 and size > 0 else 1.0


def _first_missing(common: list[tuple[Point, Point]], *steps: list[Point]) -> str:
    for place, (name, points) in enumerate(zip(("first", "second"), steps, strict=True)):
        compared = {id(pair[place]) for pair in common}
        for point in points:
            if id(point) not in compared:
                where = point.module or "the model"
                return f"{where}, {point.op} in {point.phase}, of the {name}"
    return "none"
