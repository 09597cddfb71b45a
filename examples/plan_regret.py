"""How far the choices of mixprec.plan are from the best of all assignments.

    python examples/plan_regret.py --out bench/results/cpu/plan-regret.json

Of models of two layers, each assignment of three formats is trained for 100 steps from one
checkpoint, in two orders of the data. The regret is the loss of the one that the plan chooses for a
limit of time, less that of the best within the limit, as a part of the median less that of the
best. The best in one order is measured in the other: the least of many measurements is partly luck.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from plan_tasks import SMALL, Task, report

# Written before the first run.
FORMATS = ("nvfp4-1x16", "fp8", "bf16")
TIMES = (0.35, 0.5, 0.7)

Assignment = dict[str, dict[str, str]]


def every(plan: Any) -> list[Assignment]:
    places = [(name, product) for name, row in plan.measured.items() for product in row["harm"]]
    found = []
    for recipes in itertools.product(FORMATS, repeat=len(places)):
        chosen: Assignment = {name: {} for name in plan.measured}
        for (name, product), recipe in zip(places, recipes, strict=True):
            chosen[name][product] = recipe
        found.append(chosen)
    return found


def regret(name: str) -> dict[str, Any]:
    task = Task(name)
    plan = task.plan({"time": 1.0}, FORMATS)
    program, total = plan.program(), plan.bf16["time"]
    rows = [
        {
            "recipes": plan.replaced(chosen).recipes,
            "time": program.value("time", chosen) / total,
            "predicted": program.value("loss", chosen),
            "losses": [task.run(plan.replaced(chosen).apply, order) for order in range(2)],
        }
        for chosen in every(plan)
    ]
    found: dict[str, Any] = {"rows": rows, "regret": {}}
    for limit in TIMES:
        chosen = program.solve(["loss", "time"], {"time": limit * total * (1 + 1e-9)})
        feasible = [row for row in rows if row["time"] <= limit * (1 + 1e-6)]
        recipes = plan.replaced(chosen).recipes
        (own,) = (row["losses"] for row in feasible if row["recipes"] == recipes)
        more = span = 0.0
        for there in range(2):
            best = min(feasible, key=lambda row: row["losses"][1 - there])["losses"][there]
            more += own[there] - best
            span += statistics.median(row["losses"][there] for row in feasible) - best
        found["regret"][str(limit)] = more / span
    return found


def measure(name: str) -> dict[str, Any]:
    found = regret(name)
    print(name, "regret", {k: f"{v:.1%}" for k, v in found["regret"].items()}, flush=True)
    return found


if __name__ == "__main__":
    report(__doc__, SMALL, measure)
