"""A plan as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...recipes import GEMMS
from ..audit.records import readable
from ..report_table import aligned

if TYPE_CHECKING:
    from .plan import Plan


def limits(budget: Mapping[str, float]) -> str:
    return ", ".join(f"{name} <= {limit:g}" for name, limit in budget.items())


def summary(plan: Plan) -> str:
    at = f" on {plan.hardware}" if plan.hardware else ", counted in FLOPs of bf16"
    planned, total = _flops(plan)
    lines = [
        f"plan for {limits(plan.budget)}: loss +{plan.predicted['loss']:.4g} (bf16 "
        f"+{plan.bf16['loss']:.4g}), time {plan.predicted['time']:.3f} of bf16's{at}, memory "
        f"{plan.predicted['memory']:.3f} of what these layers keep in bf16; {readable(planned)} of "
        f"{readable(total)}FLOP are planned"
    ]
    lines += (f"left out: {name}: {reason}" for name, reason in plan.left_out.items())
    return "\n".join(lines)


def _flops(plan: Plan) -> tuple[int, int]:
    """Of the planned products of a step, and of all."""
    planned = sum(row["flops"] * len(row["harm"]) for row in plan.measured.values())
    return planned, planned + int(plan.rest["flops"])


def table(plan: Plan) -> str:
    total = _flops(plan)[1]
    loss = plan.predicted["loss"] or 1.0
    rows = [["layer", *GEMMS, "of the loss", "of the FLOPs"]]
    for name, products in plan.assignment().items():
        harm = plan.measured[name]["harm"]
        own = sum(harm[product][recipe] for product, recipe in products.items())
        flops = plan.measured[name]["flops"] * len(harm)
        rows.append([
            name or "(the model)", *(products.get(p, "-") for p in GEMMS), f"{own / loss:.1%}",
            f"{flops / total:.1%}",
        ])  # fmt: skip
    return "\n".join(aligned(rows))


def why(plan: Plan, layer: str) -> str:
    if layer not in plan.measured:
        reason = plan.left_out.get(layer)
        if reason is None:
            names = ", ".join(map(repr, plan.measured))
            raise ValueError(f"Plan.why: layer must be one of {names}, got {layer!r}")
        return f"{layer} is left out: {reason}"
    row, total = plan.measured[layer], plan.bf16["time"] + plan.rest["time"] or 1.0
    lines = []
    for product, recipe in plan.assignment()[layer].items():
        harm, time = row["harm"][product], row["costs"]["product"][product]
        said = f"{product} in {recipe}: loss +{harm[recipe]:.3g}"
        for word, others in (
            ("faster", [r for r in harm if time[r] < time[recipe]]),
            ("better", [r for r in harm if harm[r] < harm[recipe]]),
        ):
            if others:
                best = min(others, key=lambda r: (harm[r], time[r]))
                said += (
                    f"; {word} is {best}, loss +{harm[best]:.3g}, time "
                    f"{(time[best] - time[recipe]) / total:+.2%}"
                )
        lines.append(said)
    return "\n".join(lines)
