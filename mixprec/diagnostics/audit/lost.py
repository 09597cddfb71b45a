"""What an op loses to its formats: sums of squares and counts, by op and by operand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..stats.measure import decibels, squares

_PRODUCTS = {
    frozenset("xw"): "y",
    frozenset("gw"): "grad_input",
    frozenset("gx"): "grad_weight",
}


@dataclass
class Operand:
    """Elements of an operand: their number, the zeros, those that became 0 or Inf or saturated in
    the cast, the two halves of the SQNR of the cast, and the noise that the format explains."""

    elements: int = 0
    zeros: int = 0
    underflow: int = 0
    overflow: int = 0
    signal: float = 0.0
    noise: float = 0.0
    unsaturated: float = 0.0  # of the noise, that of elements which were not cut off
    expected: float = 0.0

    @property
    def beyond(self) -> float:
        """The root mean square error of the cast as a multiple of what its format explains."""
        return _ratio(self.unsaturated, self.expected)

    @property
    def sqnr(self) -> float | None:
        """Of the cast, in dB."""
        return decibels(self.signal, self.noise)

    def add(
        self,
        used: torch.Tensor,
        given: torch.Tensor,
        saturated: torch.Tensor | None,
        expected: float | None,
    ) -> None:
        """used: the values in the op's format; given: before the cast, or without one those of the
        step in FP32; saturated: which elements have the largest code; expected: the noise of a
        cast, None without one."""
        self.elements += used.numel()
        none, lost = used == 0, torch.isfinite(given) & ~torch.isfinite(used)
        if saturated is not None:
            # More than half a step: not what rounding to nearest does to the largest code.
            lost |= saturated & (given.abs() > used.abs() * (1 + 2.0**-4))
        counts = torch.stack([none.sum(), (none & (given != 0)).sum(), lost.sum()]).tolist()
        self.zeros += counts[0]
        self.underflow += counts[1]
        self.overflow += counts[2]
        if expected is not None:
            signal, noise = map(float, squares(given, used))
            self.signal += signal
            self.noise += noise
            if counts[2]:
                noise = float(squares(given, torch.where(lost, given, used))[1])
            self.unsaturated += noise
            self.expected += expected


@dataclass
class Lost:
    """Of the calls of an op. own: against the op in FP32 on the operands that it had, as they were
    before they were cast for it; total: against the whole step in FP32; each the two halves of an
    SQNR. noise: against the op in FP32 on the operands as they were cast; expected: of noise, what
    rounding explains. operands: by role, "x", "w" or "g"; what_if: by recipe, as own, had the op's
    operands been cast by it."""

    own_signal: float = 0.0
    own_noise: float = 0.0
    total_signal: float = 0.0
    total_noise: float = 0.0
    noise: float = 0.0
    expected: float = 0.0
    operands: dict[str, Operand] = field(default_factory=dict)
    what_if: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def own(self) -> float | None:
        """SQNR in dB."""
        return decibels(self.own_signal, self.own_noise)

    @property
    def total(self) -> float | None:
        """SQNR in dB, of the op's own errors and those that its operands brought."""
        return decibels(self.total_signal, self.total_noise)

    @property
    def product(self) -> str | None:
        """Which of a layer's: "y", "grad_input" or "grad_weight"."""
        return _PRODUCTS.get(frozenset(self.operands))

    @property
    def beyond(self) -> float:
        """The root mean square error of what the op computes of its operands, as a multiple of
        what rounding explains."""
        return _ratio(self.noise, self.expected)

    def sqnr_if(self, recipe: str) -> float | None:
        """Of the product in dB, with the operands that the recipe makes."""
        return decibels(*self.what_if[recipe]) if recipe in self.what_if else None

    def add(self, other: Lost) -> None:
        for name in ("own_signal", "own_noise", "total_signal", "total_noise", "noise", "expected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for recipe, halves in other.what_if.items():
            mine_if = self.what_if.get(recipe, (0.0, 0.0))
            self.what_if[recipe] = mine_if[0] + halves[0], mine_if[1] + halves[1]
        for role, operand in other.operands.items():
            mine = self.operands.setdefault(role, Operand())
            for name, n in vars(operand).items():
                setattr(mine, name, getattr(mine, name) + n)


def _ratio(noise: float, expected: float) -> float:
    if math.isnan(noise) or math.isnan(expected):
        return math.inf
    if noise <= 0 or expected <= 0:
        return math.inf if noise > 0 else 0.0
    return math.sqrt(noise / expected)
