"""How good the choices of mixprec.plan are: against all others, against rules, and their budgets.

    python examples/plan_choice.py --out bench/results/cpu/plan-choice.json

regret: of models of two layers, each assignment of three formats is trained for 100 steps from one
checkpoint. The loss of the one that the plan chooses for a limit of time, less the least of all
within the limit, as a part of the median less the least.
rules: at the time of "the first and the last layer in bf16, the rest in 4 bits", the loss of a plan
against this rule, against one format for all, and against random choices; paired, over seeds of the
data.
kept: how often the loss grows by no more than the limit of a plan, over seeds of the data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

from plan_tasks import MODELS, SMALL, Task

from mixprec.bench.environment import environment

# Written before the first run.
FORMATS = ("nvfp4-1x16", "fp8", "bf16")
TIMES = (0.35, 0.5, 0.7)
SEEDS = 5
RANDOM = 3  # random assignments for each seed
LIMIT = 0.5  # of the loss, as a part of what all products in 4 bits are predicted to add

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
            "loss": statistics.fmean(task.run(plan.replaced(chosen), seed) for seed in range(2)),
        }
        for chosen in every(plan)
    ]
    found: dict[str, Any] = {"rows": rows, "regret": {}}
    for limit in TIMES:
        chosen = program.solve(["loss", "time"], {"time": limit * total * (1 + 1e-9)})
        feasible = [row for row in rows if row["time"] <= limit * (1 + 1e-6)]
        recipes = plan.replaced(chosen).recipes
        (own,) = (row["loss"] for row in feasible if row["recipes"] == recipes)
        losses = [row["loss"] for row in feasible]
        best, median = min(losses), statistics.median(losses)
        found["regret"][str(limit)] = (own - best) / (median - best)
    return found


def at_random(plan: Any, limit: float, draws: random.Random) -> Assignment:
    """One with a time of no more than the limit, and of no less than 0.02 below it."""
    program, total = plan.program(), plan.bf16["time"]
    while True:
        share = draws.random()
        chosen = {
            name: {
                p: FORMATS[0] if draws.random() < share else draws.choice(FORMATS)
                for p in row["harm"]
            }
            for name, row in plan.measured.items()
        }
        if limit - 0.02 <= program.value("time", chosen) / total <= limit:
            return chosen


def rules(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "kept": []}
    for seed in range(SEEDS):
        task = Task(name, seed=seed)
        plan = task.plan({"time": 1.0}, FORMATS)
        program, total = plan.program(), plan.bf16["time"]
        low = {n: dict.fromkeys(row["harm"], FORMATS[0]) for n, row in plan.measured.items()}
        first, *_, last = plan.measured
        rule = low | {n: dict.fromkeys(low[n], "bf16") for n in (first, last)}
        limit = program.value("time", rule) / total
        best = program.solve(["loss", "time"], {"time": limit * total * (1 + 1e-9)})
        draws = random.Random(seed)
        ways = {"plan": best, "first and last in bf16": rule, "nvfp4 for all": low}
        ways |= {f"random {i}": at_random(plan, limit, draws) for i in range(RANDOM)}
        exact = task.run(None)
        losses = {way: task.run(plan.replaced(chosen)) - exact for way, chosen in ways.items()}
        found["losses"].append({"time": limit, **losses})
        most = LIMIT * program.value("loss", low)
        bounded = task.plan({"loss": most}, FORMATS)
        grown = task.run(bounded) - exact
        found["kept"].append({"limit": most, "grown": grown, "time": bounded.predicted["time"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {"regret": {}, "rules": {}, "environment": environment(quick=False)}
    for name in SMALL:
        report["regret"][name] = regret(name)
        shares = report["regret"][name]["regret"]
        print(name, "regret", {k: f"{v:.1%}" for k, v in shares.items()}, flush=True)
    for name in MODELS:
        report["rules"][name] = found = rules(name)
        for row in found["losses"]:
            print(name, {k: f"{v:.4f}" for k, v in row.items()}, flush=True)
        for row in found["kept"]:
            print(name, {k: f"{v:.4f}" for k, v in row.items()}, flush=True)
    if given.out:
        given.out.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
