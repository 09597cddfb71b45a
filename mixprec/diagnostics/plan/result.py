"""Plan: a recipe for each layer of a model, with what is predicted and what it was made of."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...memory.compress_saved import Bits
from ...nn._layer import Layer as Converted
from ...nn.convert import convert
from ...nn.kinds import adapters, layer_for
from ...recipes import GEMMS, PREFIXES, Recipe
from ..writers import aligned, layer_name, prefixed
from .program import QUANTITIES, Assignment, Costs, Program


@dataclass
class Plan:
    """A recipe for each layer of a model.

    recipes: by layer, as `mixprec.convert` takes them; shapes: of their weights; budget: what
    was asked for; predicted: "loss", how much it grows over the planned training, "time" of all
    products, as a part of that in bf16, and "memory" of the planned layers, as a part of the same;
    bf16: these of the planned layers in bf16; rest: FLOPs of the products of a step that are not
    planned and stay in bf16; left_out: layers that were not planned, and why; measured: by layer
    and product, what the plan was made of.
    """

    recipes: dict[str, str]
    shapes: dict[str, list[int]]
    budget: dict[str, float]
    predicted: dict[str, float]
    bf16: dict[str, float]
    rest: int
    left_out: dict[str, str] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)

    def apply(
        self, model: nn.Module, *, saved: Bits | None = None, fuse: bool = False
    ) -> nn.Module:
        """`mixprec.convert` the model, in place, with the recipe of each layer; what the plan has
        left out gets bf16. At any step of a training run. saved, fuse: as in `convert`. ValueError
        names the first layer that this model does not have as the planned one has it."""
        layers = convertible(model)
        for name, shape in self.shapes.items():
            weight: Any = getattr(layers.get(name), "weight", None)
            got = "none of that name" if weight is None else f"one of {list(weight.shape)}"
            if weight is None or list(weight.shape) != shape:
                raise ValueError(
                    f"plan: this model must have a layer {name!r} with a weight of shape {shape}, "
                    f"as the one that was planned, got {got}"
                )
        if unplanned := [name for name in layers if name not in {*self.shapes, *self.left_out}]:
            raise ValueError(f"plan: this model has a layer {unplanned[0]!r} that was not planned")
        overrides = {glob.escape(name): recipe for name, recipe in self.recipes.items()}
        return convert(model, "bf16", overrides=overrides, saved=saved, fuse=fuse)

    def assignment(self) -> Assignment:
        """The name of the recipe of each product, by layer."""
        return {
            name: {p: Recipe.parse(r).product(p).name for p in self.measured[name]["harm"]}
            for name, r in self.recipes.items()
            if name in self.measured
        }

    def replaced(self, assignment: Assignment) -> Plan:
        """The plan with this assignment, and what it predicts for it. ValueError for a layer or a
        recipe that was not measured."""
        for name, row in self.measured.items():
            for product, measured in row["harm"].items():
                if (got := assignment.get(name, {}).get(product)) not in measured:
                    raise ValueError(
                        f"plan: the recipe of {product} of layer {name!r} must be one of those "
                        f"that were measured, {', '.join(map(repr, measured))}, got {got!r}"
                    )
        kept = {name: r for name, r in self.recipes.items() if name not in self.measured}
        recipes = kept | {name: joined(assignment[name]) for name in self.measured}
        predicted = prediction(self.program(), assignment, self.bf16, self.rest)
        return replace(self, recipes=recipes, predicted=predicted)

    def program(self) -> Program:
        """What the plan was solved with, for other budgets."""
        harm = {name: row["harm"] for name, row in self.measured.items()}
        return Program(harm, {name: Costs(**row["costs"]) for name, row in self.measured.items()})

    def _flops(self) -> tuple[int, int]:
        """Of the planned products of a step, and of all."""
        planned = sum(row["flops"] * len(row["harm"]) for row in self.measured.values())
        return planned, planned + self.rest

    def table(self) -> str:
        """A line for each layer: the recipes of its products, its part of the loss and of the
        FLOPs."""
        total, loss = self._flops()[1], self.predicted["loss"] or 1.0
        rows = [["layer", *GEMMS, "of the loss", "of the FLOPs"]]
        for name, products in self.assignment().items():
            harm = self.measured[name]["harm"]
            growth = sum(harm[product][recipe] for product, recipe in products.items())
            flops = self.measured[name]["flops"] * len(harm)
            recipes = (products.get(p, "-") for p in GEMMS)
            rows.append(
                [layer_name(name), *recipes, f"{growth / loss:.1%}", f"{flops / total:.1%}"]
            )
        return "\n".join(aligned(rows))

    def why(self, layer: str) -> str:
        """Why each product of a layer has its recipe: what the next cheaper one would add to the
        loss, and what the next better one would cost."""
        if layer not in self.measured:
            reason = self.left_out.get(layer)
            if reason is None:
                names = ", ".join(map(repr, self.measured))
                raise ValueError(f"Plan.why: layer must be one of {names}, got {layer!r}")
            return f"{layer} is left out: {reason}"
        row, total = self.measured[layer], self.bf16["time"] + self.rest or 1.0
        lines = []
        for product, recipe in self.assignment()[layer].items():
            harm, time = row["harm"][product], row["costs"]["product"][product]
            line = f"{product} in {recipe}: loss +{harm[recipe]:.3g}"
            for word, others in (
                ("faster", [r for r in harm if time[r] < time[recipe]]),
                ("better", [r for r in harm if harm[r] < harm[recipe]]),
            ):
                if others:
                    best = min(others, key=lambda r: (harm[r], time[r]))
                    added = (time[best] - time[recipe]) / total
                    line += f"; {word} is {best}, loss +{harm[best]:.3g}, time {added:+.2%}"
            lines.append(line)
        return "\n".join(lines)

    def __str__(self) -> str:
        planned, total = map(prefixed, self._flops())
        lines = [
            f"plan for {limits_text(self.budget)}: loss +{self.predicted['loss']:.4g} (bf16 "
            f"+{self.bf16['loss']:.4g}), time {self.predicted['time']:.3f} of bf16's, counted in "
            f"FLOPs of bf16, memory {self.predicted['memory']:.3f} of what these layers keep in "
            f"bf16; {planned} of {total}FLOP are planned",
            *(f"left out: {name}: {reason}" for name, reason in self.left_out.items()),
        ]
        return "\n".join([*lines, "", self.table()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON. `recipes` may be edited."""
        Path(path).write_text(json.dumps({"version": 3, **asdict(self)}, indent=1))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written. The prediction is that of the recipes in the file, of
        layers that were measured. ValueError for a file of another kind, layers that the model did
        not have, and recipes that were not measured."""
        try:
            content = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"Plan.load: {path} must be JSON: {error}") from error
        names = {field.name for field in fields(Plan)}
        valid = isinstance(content, dict) and content.pop("version", None) == 3
        if not valid or content.keys() != names:
            raise ValueError(f"Plan.load: {path} must be a file of Plan.save, of version 3")
        plan = Plan(**content)
        if unknown := plan.recipes.keys() - plan.shapes.keys() - plan.left_out.keys():
            raise ValueError(f"Plan.load: there was no layer {min(unknown)!r} in the planned model")
        for name, recipe in plan.recipes.items():
            if Recipe.parse(recipe).outliers:
                raise ValueError(
                    f"Plan.load: the recipe of layer {name!r} must have no outliers, which are not "
                    f"measured, got {recipe!r}"
                )
        return plan.replaced(plan.assignment())


def limits_text(budget: Mapping[str, float]) -> str:
    return ", ".join(f"{name} <= {limit:g}" for name, limit in budget.items())


def convertible(model: nn.Module) -> dict[str, nn.Module]:
    """Those that convert takes."""
    added = adapters(model, of_4bit=False)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in added and (isinstance(module, Converted) or layer_for(module))
    }


def joined(products: Mapping[str, str]) -> str:
    """The name of a layer's recipe."""
    others = (f"{prefix}{products[p]}" for p, prefix in PREFIXES.items() if p in products)
    return Recipe.parse("+".join([products[GEMMS[0]], *others])).name


def prediction(
    program: Program, assignment: Assignment, bf16: Mapping[str, float], rest: float
) -> dict[str, float]:
    loss, time, memory = (program.value(name, assignment) for name in QUANTITIES)
    return {
        "loss": loss,
        "time": (time + rest) / ((bf16["time"] + rest) or 1.0),
        "memory": memory / (bf16["memory"] or 1.0),
    }
