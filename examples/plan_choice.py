"""How good the choices of mixprec.plan are: against rules of thumb, and their budgets.

    python examples/plan_choice.py --out bench/results/cpu/plan-choice.json

rules: at the time of "the first and the last layer in bf16, the rest in 4 bits", the loss of a plan
against this rule, against one format for all, against the rule of SNIP and against random choices;
paired, over seeds of the data.
kept: how often the loss grows by no more than the limit of a plan, over seeds of the data.
"""

from __future__ import annotations

import random
from typing import Any

import snip_rule
from plan_tasks import MODELS, Task, report

# Written before the first run.
FORMATS = ("nvfp4-1x16", "fp8", "bf16")
SEEDS = 5
RANDOM = 3  # random assignments for each seed
LIMIT = 0.5  # of the loss, as a part of what all products in 4 bits are predicted to add

Assignment = dict[str, dict[str, str]]


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
        ways["SNIP"] = snip_rule.choose(task, plan, FORMATS, limit * total * (1 + 1e-9))
        ways |= {f"random {i}": at_random(plan, limit, draws) for i in range(RANDOM)}
        exact = task.run(None)
        losses = {
            way: task.run(plan.replaced(chosen).apply) - exact for way, chosen in ways.items()
        }
        found["losses"].append({"time": limit, **losses})
        most = LIMIT * program.value("loss", low)
        bounded = task.plan({"loss": most}, FORMATS)
        grown = task.run(bounded.apply) - exact
        found["kept"].append({"limit": most, "grown": grown, "time": bounded.predicted["time"]})
    return found


def measure(name: str) -> dict[str, Any]:
    found = rules(name)
    for row in (*found["losses"], *found["kept"]):
        print(name, {k: f"{v:.4f}" for k, v in row.items()}, flush=True)
    return found


if __name__ == "__main__":
    report(__doc__, MODELS, measure)
