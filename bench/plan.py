"""How mixprec.plan predicts and chooses, as examples/plan_study.py and plan_choice.py found."""

from __future__ import annotations

import math
import statistics
from typing import Any

from . import pages
from .table import markdown

_KINDS = {"mixed": "in random shares", "equal": "4 bits in half of the FLOPs"}
_KEYS = {"predicted": "plan", "first order": "first order only", "low": "FLOPs in few bits"}


def study(content: dict[str, Any]) -> str:
    """Rank correlations of what was predicted with what was measured."""
    body = []
    for name, found in content["models"].items():
        noise = math.sqrt(statistics.fmean(map(statistics.variance, found["noise"])))
        for kind, words in _KINDS.items():
            measured = [row["measured"] for row in found["rows"] if row["kind"] == kind]
            spread = max(measured) - min(measured)
            cells = (f"{v:.2f} ({a:.2f} to {b:.2f})" for v, a, b in _each(found, kind))
            needed = math.ceil((10 * noise / spread) ** 2)
            sizes = (f"{spread:.4f}", f"{noise:.4f}", str(needed))
            body.append((name, words, str(len(measured)), *sizes, *cells))
    sizes = ("spread", "of seeds", "seeds needed")
    header = ("model", "assignments", "runs", *sizes, *_KEYS.values())
    return (
        f"{markdown(header, body)}\n\nSpearman's rank correlation with the growth of the "
        "validation loss, with 95% intervals (bootstrap). spread: of that growth, between the best "
        "and the worst assignment; of seeds: its standard deviation with other seeds of stochastic "
        "rounding; seeds needed: runs of each assignment, where it was one, with which the spread "
        "is 10 times as large as the deviation of their mean. "
        f"{pages.machine(content['environment'])}"
    )


def _each(found: dict[str, Any], kind: str) -> list[tuple[float, float, float]]:
    return [tuple(found["spearman"][kind][key]) for key in _KEYS]


def choice(content: dict[str, Any]) -> str:
    """The regret of plans, their wins against rules, and how often budgets were kept."""
    limits = list(next(iter(content["regret"].values()))["regret"])
    regret = [
        (name, str(len(found["rows"])), *(f"{found['regret'][limit]:.1%}" for limit in limits))
        for name, found in content["regret"].items()
    ]
    first = markdown(("model", "assignments", *(f"time <= {limit}" for limit in limits)), regret)
    body = []
    for name, found in content["rules"].items():
        ways = [way for way in found["losses"][0] if way not in ("time", "plan")]
        for way in ways:
            pairs = [(row["plan"], row[way]) for row in found["losses"]]
            better = sum(own < other for own, other in pairs)
            means = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            body.append(
                (name, way, *(f"{mean:+.2g}" for mean in means), f"{better} of {len(pairs)}")
            )
    header = ("model", "against", "loss of the plan", "loss of the other", "better")
    second = markdown(header, body)
    kept = [
        (
            name,
            f"{statistics.fmean(row['limit'] for row in found['kept']):.2g}",
            f"{max(row['grown'] for row in found['kept']):+.2g}",
            f"{sum(row['grown'] <= row['limit'] for row in found['kept'])} of {len(found['kept'])}",
        )
        for name, found in content["rules"].items()
    ]
    third = markdown(("model", "limit, mean", "growth, largest", "kept"), kept)
    return (
        f"Regret, of all assignments of models of two layers:\n\n{first}\n\nAt the time of the "
        f"rule, over seeds of the data:\n\n{second}\n\nLimits of the loss:\n\n{third}\n\n"
        f"{pages.machine(content['environment'])}"
    )
