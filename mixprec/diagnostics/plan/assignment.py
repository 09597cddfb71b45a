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
_MOST_WRONG = 100  # solutions that a solve leaves out


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
        """The assignment within the limits that is best for the first objective, of those within a
        millionth of it the best for the second, and so on; None if there is none."""
        limits, found = dict(limits), None
        for objective in objectives:
            if (better := self._solve(objective, limits)) is None:
                break  # the first; after it, where the tolerance of the solver leaves nothing
            found = better
            limits[objective] = self.value(objective, found) * (1 + 1e-6)
        return found

    def _solve(self, objective: str, limits: Mapping[str, float]) -> Assignment | None:
        """Exactly, although the solver's tolerances are parts of the largest cost: what alone costs
        more than a limit, or than the best solution yet, is left out of the next one, and so are
        solutions that exceed a limit by less than the tolerance."""
        most = dict(limits)
        best: Assignment | None = None
        wrong: list[Assignment] = []
        while len(wrong) < _MOST_WRONG:
            allowed = [
                all(self._costs[q][i] <= limit * (1 + 1e-9) for q, limit in most.items())
                for i in range(len(self._variables))
            ]
            found = self._solve_roughly(objective, limits, wrong, allowed)
            if found is None:
                return best
            if any(self.value(q, found) > limits[q] * (1 + 1e-9) for q in limits):
                wrong.append(found)
                continue
            value = self.value(objective, found)
            if best is not None and value >= self.value(objective, best):
                return best
            best, most[objective] = found, min(value, most.get(objective, value))
            if self._largest(objective, allowed) <= value:
                return best
        if best is None:  # none of those that were left out
            limits = {q: limit * (1 - 1e-5) for q, limit in limits.items()}
            best = self._solve_roughly(objective, limits, [], allowed)
        return best

    def _largest(self, quantity: str, allowed: Sequence[bool]) -> float:
        costs = zip(self._costs[quantity], allowed, strict=True)
        return max((cost for cost, is_allowed in costs if is_allowed), default=0.0)

    def _solve_roughly(
        self,
        objective: str,
        limits: Mapping[str, float],
        wrong: Sequence[Assignment],
        allowed: Sequence[bool],
    ) -> Assignment | None:
        """Another one than these, of the variables that are allowed."""
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
            scale, costs = self._largest(quantity, allowed) or 1.0, self._costs[quantity]
            rows.append({i: costs[i] / scale for i in range(count) if allowed[i]})
            low.append(0.0)
            high.append(limit / scale)
        index = {key: i for i, key in enumerate(self._variables)}
        for one in wrong:
            chosen = ((name, p, r) for name, products in one.items() for p, r in products.items())
            rows.append(dict.fromkeys((index[key] for key in chosen), 1.0))
            low.append(0.0)
            high.append(len(rows[-1]) - 1.0)
        matrix = self._sparse.lil_matrix((len(rows), count))
        for i, row in enumerate(rows):
            for j, value in row.items():
                matrix[i, j] = value
        costs = self._costs[objective]
        # The solver stops where 1e-6 is left to gain.
        scale = (self._largest(objective, allowed) or 1.0) / 1e4
        result = self._scipy.milp(
            [cost / scale if ok else 0.0 for cost, ok in zip(costs, allowed, strict=True)],
            constraints=self._scipy.LinearConstraint(matrix.tocsr(), low, high),
            integrality=[1] * count,
            bounds=self._scipy.Bounds(0, [float(ok) for ok in allowed]),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        found: Assignment = {name: {} for name in self._harm}
        for (name, part, recipe), chosen in zip(self._variables, result.x, strict=True):
            if part not in READ_BY and chosen > 0.5:
                found[name][part] = recipe
        return found
