"""How well a plan predicts: the growth of the loss in training runs with random assignments.

    python examples/plan_study.py --out bench/results/cpu/plan-study.json

Each model is trained in FP32, then continued from that checkpoint for 100 steps, in FP32 and with
each assignment, on the same batches, in two orders. Half of the assignments mix formats of 4, 8
and 16 bits in random shares, half have 4 bits in half of the FLOPs. Predicted is the growth of the
loss that mixprec.plan has for the assignment; measured is that of the mean loss over the validation
data, in the formats of the assignment, against the run in FP32.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from needs import needs
from plan_tasks import Task, report

# Written before the first run.
ORDERS, MIXED, EQUAL = 2, 50, 50
FOUR, MORE = ("mxfp4", "nvfp4-1x16"), ("mxfp8", "fp8", "bf16")
# What may be in the order of the measured losses: "low", the FLOPs weighted by the bits saved.
KEYS = ("predicted", "first order", "low")
SHARE = 0.5  # of the FLOPs in 4 bits, of the second half


def assignments(plan: Any, draws: random.Random, mixed: int, equal: int) -> list[dict[str, Any]]:
    """Of the products of a plan, with their shares of FLOPs in 4 bits."""
    products = [(n, p, row["flops"]) for n, row in plan.measured.items() for p in row["harm"]]
    total, found = sum(flops for *_, flops in products), []
    for i in range(mixed + equal):
        share = draws.random() if i < mixed else SHARE
        chosen: dict[str, dict[str, str]] = {name: {} for name in plan.measured}
        used = 0.0
        for name, product, flops in draws.sample(products, len(products)):
            four = draws.random() < share if i < mixed else used + flops / 2 <= share * total
            used += flops * four
            chosen[name][product] = draws.choice(FOUR if four else MORE)
        bits = {name: 4 if name in FOUR else 16 if name == "bf16" else 8 for name in FOUR + MORE}
        low = sum(f * (1 - bits[chosen[n][p]] / 16) for n, p, f in products) / total
        found.append({"kind": "mixed" if i < mixed else "equal", "recipes": chosen, "low": low})
    return found


def study(name: str, mixed: int, equal: int, orders: int = ORDERS) -> dict[str, Any]:
    task = Task(name)
    plan = task.plan({"loss": 1e9}, FOUR + MORE)
    program = plan.program()
    exact = [task.run(None, order) for order in range(orders)]
    rows = assignments(plan, random.Random(0), mixed, equal)
    for row in rows:
        chosen = row["recipes"]
        row["predicted"] = program.value("loss", chosen)
        forward = ((name, products["forward"]) for name, products in chosen.items())
        row["first order"] = abs(sum(plan.measured[name]["first"][r] for name, r in forward))
        replaced = plan.replaced(chosen)
        row["orders"] = [task.run(replaced.apply, i) - loss for i, loss in enumerate(exact)]
        row["measured"], row["recipes"] = statistics.fmean(row["orders"]), replaced.recipes
    return {"fp32": exact, "rows": rows, "measured": plan.measured}


def spearman(rows: list[dict[str, Any]], key: str) -> tuple[float, float, float]:
    """The rank correlation of `key` with what was measured, and its 95% interval (bootstrap)."""
    with needs("scipy"):
        from scipy.stats import spearmanr
    pairs = [(row[key], row["measured"]) for row in rows]
    draws = random.Random(0)
    values = sorted(
        float(spearmanr(*zip(*draws.choices(pairs, k=len(pairs)), strict=True)).statistic)
        for _ in range(1000)
    )
    return float(spearmanr(*zip(*pairs, strict=True)).statistic), values[25], values[974]


def measure(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    found = study(name, MIXED, EQUAL)
    found["spearman"] = {}
    for kind in ("mixed", "equal"):
        rows = [row for row in found["rows"] if row["kind"] == kind]
        spread = sorted(row["measured"] for row in rows)
        print(f"{name:5} {kind:6} loss {spread[0]:+.4f} to {spread[-1]:+.4f}", end="")
        found["spearman"][kind] = {key: spearman(rows, key) for key in KEYS}
        both = [dict(zip(("one", "measured"), row["orders"], strict=True)) for row in rows]
        found["spearman"][kind]["orders"] = spearman(both, "one")
        for key, (value, low, high) in found["spearman"][kind].items():
            print(f"  {key} {value:.2f} ({low:.2f} to {high:.2f})", end="")
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    report(__doc__, ("gpt", "vit", "mlp"), measure)
