"""The cost of a layer's products, and the integer program that chooses their recipes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ops._reference.block_formats import parse
from ...recipes import Recipe
from .sensitivity import GRAD_INPUT, GRAD_WEIGHT, Layer

Harm = Mapping[str, Mapping[str, float]]  # of a layer, by product and recipe
Assignment = dict[str, dict[str, str]]  # layer, product, recipe
QUANTITIES = ("loss", "time", "memory")
_MOST_WRONG = 100  # solutions that a solve leaves out


# How many times as fast as those of 16 bits products are, by the bits of their operands' elements.
_SPEED = {16: 1.0, 8: 2.0, 6: 2.0, 4: 4.0}


def choose(formats: Iterable[Recipe | str]) -> dict[str, Recipe]:
    """The recipes of a plan by name, "bf16" always with them."""
    chosen = {"bf16": Recipe.parse("bf16")}
    for given in formats:
        recipe = Recipe.parse(given)
        if recipe.products or recipe.outliers or recipe.is_delayed or recipe.needs_loss_scaling:
            raise ValueError(
                "plan: formats must be recipes of all three products without state, outliers and "
                f"loss scaling, got {recipe.name}"
            )
        if Recipe.parse(recipe.name) != recipe:
            raise ValueError(f"plan: formats must be named recipes, got another {recipe.name!r}")
        chosen[recipe.name] = recipe
    return chosen


_KEPT = {GRAD_WEIGHT: "x", GRAD_INPUT: "w"}  # for backward, by the product that reads it


@dataclass(frozen=True)
class Costs:
    """By product and recipe. product: time, in FLOPs of 16-bit products; kept: bytes for
    backward."""

    product: dict[str, dict[str, float]]
    kept: dict[str, dict[str, float]]


def costs(layer: Layer, recipes: Mapping[str, Recipe]) -> Costs:
    """Of a step, in 16-bit dtypes where nothing is cast. bf16 keeps x itself, and w as the
    parameter that is there anyway."""
    sizes = {"x": layer.x, "w": layer.w}
    product: dict[str, dict[str, float]] = {name: {} for name in layer.harm}
    kept: dict[str, dict[str, float]] = {name: {} for name in layer.harm}
    for name, (key, recipe) in itertools.product(layer.harm, recipes.items()):
        product[name][key] = layer.flops / _SPEED[recipe.x.bits]
        role = _KEPT.get(name, "")
        is_kept = role == "x" or (role == "w" and recipe.is_scaled)
        kept[name][key] = sizes[role] * _bytes(recipe, role) if is_kept else 0.0
    return Costs(product, kept)


def _bytes(recipe: Recipe, role: str) -> float:
    """Of an element with its part of the scales."""
    name = recipe.block_format(role)
    bits: int = getattr(recipe, role).bits
    if name is None:
        return bits / 8
    stored = 4 if bits == 4 else 8  # six bits take a byte
    return stored / 8 + 1 / parse("plan", name).block


@dataclass(frozen=True)
class _Choice:
    """The recipes of a layer's products, and what they cost by quantity."""

    layer: str
    recipes: dict[str, str]
    cost: dict[str, float]


class Program:
    """Minimize one of loss, time and memory with limits for the others.

    For each layer and each assignment of recipes to its products one variable in {0, 1}, of which
    one is 1 in each layer, without those that another one is as good as in all three quantities.
    """

    def __init__(self, harm: Mapping[str, Harm], costs: Mapping[str, Costs]) -> None:
        """Both by layer."""
        try:
            self._scipy: Any = importlib.import_module("scipy.optimize")
            self._sparse: Any = importlib.import_module("scipy.sparse")
        except ImportError as error:
            raise ImportError(f"plan needs scipy ({error}): pip install 'mixprec[plan]'") from error
        self._harm, self._costs = harm, costs
        self._choices = [choice for name in harm for choice in self._best(name)]

    def _terms(self, quantity: str, name: str, recipes: Mapping[str, str]) -> Iterator[float]:
        """Of a layer."""
        harm, costs = self._harm[name], self._costs[name]
        by_product = {"loss": harm, "time": costs.product, "memory": costs.kept}[quantity]
        yield from (by_product[p][recipes[p]] for p in harm if p in recipes)

    def _best(self, name: str) -> list[_Choice]:
        harm, best = self._harm[name], list[_Choice]()
        every = []
        for recipes in itertools.product(*harm.values()):
            chosen = dict(zip(harm, recipes, strict=True))
            cost = {q: _sum(self._terms(q, name, chosen)) for q in QUANTITIES}
            every.append(_Choice(name, chosen, cost))
        for choice in sorted(every, key=lambda choice: (*choice.cost.values(),)):
            if not any(all(b.cost[q] <= choice.cost[q] for q in QUANTITIES) for b in best):
                best.append(choice)
        return best

    def value(self, quantity: str, assignment: Assignment) -> float:
        """Of an assignment."""
        return _sum(t for n in self._harm for t in self._terms(quantity, n, assignment[n]))

    def uniform(self, recipe: str) -> Assignment:
        return {name: dict.fromkeys(products, recipe) for name, products in self._harm.items()}

    def solve(self, objectives: Sequence[str], limits: Mapping[str, float]) -> Assignment | None:
        """The assignment within the limits that is best for the first objective, of those within a
        millionth of it the best for the second, and so on; None if there is none."""
        limits, assignment = dict(limits), None
        for objective in objectives:
            if (better := self._solve(objective, limits)) is None:
                break  # the first; after it, where the tolerance of the solver leaves nothing
            assignment = better
            limits[objective] = self.value(objective, assignment) * (1 + 1e-6)
        return assignment

    def _solve(self, objective: str, limits: Mapping[str, float]) -> Assignment | None:
        """Exactly, although the solver's tolerances are parts of the largest cost: what alone costs
        more than a limit, or than the best solution yet, is left out of the next one, and so are
        solutions that exceed a limit by less than the tolerance."""
        largest = dict(limits)
        best: Assignment | None = None
        wrong: list[Assignment] = []
        while len(wrong) < _MOST_WRONG:
            choices = [
                choice
                for choice in self._choices
                if all(choice.cost[q] <= limit * (1 + 1e-9) for q, limit in largest.items())
            ]
            assignment = self._solve_roughly(objective, limits, wrong, choices)
            if assignment is None:
                return best
            if any(self.value(q, assignment) > limits[q] * (1 + 1e-9) for q in limits):
                wrong.append(assignment)
                continue
            value = self.value(objective, assignment)
            if best is not None and value >= self.value(objective, best):
                return best
            best, largest[objective] = assignment, min(value, largest.get(objective, value))
            if max(choice.cost[objective] for choice in choices) <= value:
                return best
        if best is None:  # none of those that were left out
            limits = {q: limit * (1 - 1e-5) for q, limit in limits.items()}
            best = self._solve_roughly(objective, limits, [], choices)
        return best

    def _solve_roughly(
        self,
        objective: str,
        limits: Mapping[str, float],
        wrong: Sequence[Assignment],
        choices: Sequence[_Choice],
    ) -> Assignment | None:
        """Another one than these, of these choices."""
        if {choice.layer for choice in choices} != self._harm.keys():
            return None
        rows: list[tuple[list[float], float, float]] = []  # of the matrix, with their limits
        for name in self._harm:
            rows.append(([float(choice.layer == name) for choice in choices], 1.0, 1.0))
        for quantity, limit in limits.items():
            costs = [choice.cost[quantity] for choice in choices]
            scale = max(costs) or 1.0
            rows.append(([cost / scale for cost in costs], 0.0, limit / scale))
        for one in wrong:
            chosen = [float(one[choice.layer] == choice.recipes) for choice in choices]
            rows.append((chosen, 0.0, len(self._harm) - 1.0))
        matrix, low, high = zip(*rows, strict=True)
        costs = [choice.cost[objective] for choice in choices]
        scale = (max(costs) or 1.0) / 1e4  # the solver stops where 1e-6 is left to gain
        result = self._scipy.milp(
            [cost / scale for cost in costs],
            constraints=self._scipy.LinearConstraint(self._sparse.csr_array([*matrix]), low, high),
            integrality=[1] * len(choices),
            bounds=self._scipy.Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        solution = zip(choices, result.x, strict=True)
        chosen_recipes = {choice.layer: choice.recipes for choice, x in solution if x > 0.5}
        return {name: dict(chosen_recipes[name]) for name in self._harm}


def _sum(terms: Iterable[float]) -> float:
    """In this order, in each version of Python."""
    total = 0.0
    for term in terms:
        total += term
    return total
