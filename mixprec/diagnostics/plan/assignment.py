"""The recipe of each product: an integer program, solved exactly."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...recipes import READ_BY
from .cost import Costs

Harm = Mapping[str, Mapping[str, float]]  # of a layer, by product and recipe
Assignment = dict[str, dict[str, str]]  # layer, product, recipe
QUANTITIES = ("loss", "time", "memory")


class Program:
    """Minimize one of loss, time and memory with limits for the others.

    For each product p and recipe r one z[p, r] in {0, 1}, sum over r of z[p, r] = 1; for each
    operand and recipe one u in {0, 1}, at least as large as the z of the products that read it:
    the cost of its cast counts once.
    """

    def __init__(self, harm: Mapping[str, Harm], costs: Mapping[str, Costs]) -> None:
        """Both by layer."""
        try:
            self._scipy: Any = importlib.import_module("scipy.optimize")
            self._sparse: Any = importlib.import_module("scipy.sparse")
        except ImportError as error:
            raise ImportError(f"plan needs scipy ({error}): pip install 'mixprec[plan]'") from error
        self._harm = harm
        self._variables: list[tuple[str, str, str]] = []
        self._costs: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        self._ones: list[list[int]] = []  # of one product
        self._casts: list[tuple[int, int]] = []  # u, z <= u
        for name, products in harm.items():
            self._add(name, products, costs[name])

    def _variable(self, key: tuple[str, str, str], **values: float) -> int:
        self._variables.append(key)
        for name in QUANTITIES:
            self._costs[name].append(values.get(name, 0.0))
        return len(self._variables) - 1

    def _add(self, name: str, harm: Harm, costs: Costs) -> None:
        places: dict[tuple[str, str], int] = {}
        for product, harms in harm.items():
            for recipe, loss in harms.items():
                places[product, recipe] = self._variable(
                    (name, product, recipe),
                    loss=loss,
                    time=costs.product[product][recipe],
                    memory=costs.kept[product][recipe],
                )
            self._ones.append([places[product, recipe] for recipe in harms])
        for role, times in costs.cast.items():
            for recipe, time in times.items():
                if time > 0:
                    u = self._variable((name, role, recipe), time=time)
                    readers = (p for p in READ_BY[role] if p in harm)
                    self._casts += ((u, places[product, recipe]) for product in readers)

    def value(self, quantity: str, assignment: Assignment) -> float:
        """Of an assignment."""
        found = 0.0
        for (name, part, recipe), cost in zip(self._variables, self._costs[quantity], strict=True):
            products = READ_BY.get(part, (part,))
            if any(assignment[name].get(product) == recipe for product in products):
                found += cost
        return found

    def uniform(self, recipe: str) -> Assignment:
        return {name: dict.fromkeys(products, recipe) for name, products in self._harm.items()}

    def solve(self, objectives: Sequence[str], limits: Mapping[str, float]) -> Assignment | None:
        """The assignment within the limits that is best for the first objective, of those the best
        for the second, and so on; None if there is none."""
        limits, found = dict(limits), None
        for objective in objectives:
            if (better := self._solve(objective, limits)) is None:
                break  # the first; after it, where the tolerance of the solver leaves nothing
            found = better
            limits[objective] = self.value(objective, found)
        return found

    def _solve(self, objective: str, limits: Mapping[str, float]) -> Assignment | None:
        count = len(self._variables)
        rows, low, high = [], [], []
        for places in self._ones:
            rows.append(dict.fromkeys(places, 1.0))
            low.append(1.0)
            high.append(1.0)
        for u, z in self._casts:
            rows.append({z: 1.0, u: -1.0})
            low.append(-1.0)
            high.append(0.0)
        for quantity, limit in limits.items():
            scale = max(map(abs, self._costs[quantity]), default=0.0) or 1.0
            rows.append({i: c / scale for i, c in enumerate(self._costs[quantity])})
            low.append(0.0)
            high.append(limit / scale)
        matrix = self._sparse.lil_matrix((len(rows), count))
        for i, row in enumerate(rows):
            for j, value in row.items():
                matrix[i, j] = value
        costs = self._costs[objective]
        # The solver stops where 1e-6 is left to gain.
        scale = (max(map(abs, costs), default=0.0) or 1.0) / 1e4
        result = self._scipy.milp(
            [cost / scale for cost in costs],
            constraints=self._scipy.LinearConstraint(matrix.tocsr(), low, high),
            integrality=[1] * count,
            bounds=self._scipy.Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        found: Assignment = {name: {} for name in self._harm}
        for (name, part, recipe), chosen in zip(self._variables, result.x, strict=True):
            if part not in READ_BY and chosen > 0.5:
                found[name][part] = recipe
        return found
