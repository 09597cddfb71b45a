"""How mixprec.plan predicts and chooses, and what outliers save: the studies of examples."""

from __future__ import annotations

import math
import statistics
from typing import Any

from . import pages
from .table import markdown

_KINDS = {"mixed": "in random shares", "equal": "4 bits in half of the FLOPs"}
_KEYS = {"predicted": "plan", "first order": "first order only", "low": "FLOPs in few bits"}
_KEYS |= {"orders": "other order"}


def study(content: dict[str, Any]) -> str:
    """Rank correlations of what was predicted with what was measured."""
    body = []
    for name, found in content["models"].items():
        for kind, words in _KINDS.items():
            rows = [row for row in found["rows"] if row["kind"] == kind]
            measured = [row["measured"] for row in rows]
            spread, noise = max(measured) - min(measured), _noise(rows)
            cells = (f"{v:.2f} ({a:.2f} to {b:.2f})" for v, a, b in _each(found, kind))
            needed = math.ceil((10 * noise / spread) ** 2)
            sizes = (f"{spread:.4f}", f"{noise:.4f}", str(needed))
            body.append((name, words, str(len(measured)), *sizes, *cells))
    sizes = ("spread", "of orders", "orders needed")
    header = ("model", "assignments", "runs", *sizes, *_KEYS.values())
    return (
        f"{markdown(header, body)}\n\nSpearman's rank correlation with the growth of the "
        "validation loss, the mean of two runs with the data in other orders, with 95% intervals "
        "(bootstrap). spread: of that growth, between the best and the worst assignment; of "
        "orders: the standard deviation of a run over orders, without what an order does to all "
        "assignments; orders needed: with which the spread is 10 times the deviation of their "
        "mean; other order: of the two runs with each other. "
        f"{pages.machine(content['environment'])}"
    )


def _noise(rows: list[dict[str, Any]]) -> float:
    """The standard deviation of one order, from the differences of rows between two of them."""
    return statistics.stdev(row["orders"][0] - row["orders"][1] for row in rows) / math.sqrt(2)


def _each(found: dict[str, Any], kind: str) -> list[tuple[float, float, float]]:
    return [tuple(found["spearman"][kind][key]) for key in _KEYS]


def regret(content: dict[str, Any]) -> str:
    """The regret of plans."""
    limits = list(next(iter(content["models"].values()))["regret"])
    body = [
        (name, str(len(found["rows"])), *(f"{found['regret'][limit]:.1%}" for limit in limits))
        for name, found in content["models"].items()
    ]
    table = markdown(("model", "assignments", *(f"time <= {limit}" for limit in limits)), body)
    return f"{table}\n\n{pages.machine(content['environment'])}"


def choice(content: dict[str, Any]) -> str:
    """The wins of plans against rules, and how often budgets were kept."""
    body = []
    for name, found in content["models"].items():
        for way in (way for way in found["losses"][0] if way not in ("time", "plan")):
            pairs = [(row["plan"], row[way]) for row in found["losses"]]
            better = sum(own < other for own, other in pairs)
            means = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            body.append(
                (name, way, *(f"{mean:+.2g}" for mean in means), f"{better} of {len(pairs)}")
            )
    header = ("model", "against", "loss of the plan", "loss of the other", "better")
    against = markdown(header, body)
    kept = [
        (
            name,
            f"{statistics.fmean(row['limit'] for row in found['kept']):.2g}",
            f"{max(row['grown'] for row in found['kept']):+.2g}",
            f"{sum(row['grown'] <= row['limit'] for row in found['kept'])} of {len(found['kept'])}",
        )
        for name, found in content["models"].items()
    ]
    limits = markdown(("model", "limit, mean", "growth, largest", "kept"), kept)
    return (
        f"{against}\n\nLimits of the loss:\n\n{limits}\n\n{pages.machine(content['environment'])}"
    )


def outliers(content: dict[str, Any]) -> str:
    """The growth of the loss with formats of 4 bits and shares of outliers."""
    body = []
    for name, seeds in content["models"].items():
        for fmt, ways in seeds[0].items():
            cells = []
            for way in ways:
                values = [found[fmt][way] for found in seeds]
                deviation = statistics.stdev(values)
                cells.append(f"{statistics.fmean(values):+.2g} ± {deviation:.1g}")
            body.append((name, fmt, *cells))
    ways = next(iter(next(iter(content["models"].values()))[0].values()))
    header = ("model", "recipe", *("no outliers" if w == "none" else w for w in ways))
    runs = len(next(iter(content["models"].values())))
    return (
        f"{markdown(header, body)}\n\nGrowth of the validation loss against FP32: mean and "
        f"standard deviation over {runs} orders of the data. "
        f"{pages.machine(content['environment'])}"
    )
