"""The rule by which SNIP chooses formats (arXiv 2602.01410), written anew from its description.

Each product of each layer has two figures for each format: in the forward pass how much the loss
changes, to first order and for an error in no particular direction, as a part of the loss; in the
backward pass by how much the update of the weights changes, as a part of the weights. Their sum
over all products is minimized for a limit of time by an integer program. An error in the gradient
of a layer's input reaches the gradients of the weights before it, with the same relative size.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

from plan_tasks import Task

from mixprec.diagnostics.plan.assignment import Program
from mixprec.diagnostics.plan.cost import Costs
from mixprec.diagnostics.plan.sensitivity import FORWARD, GRAD_INPUT, GRAD_WEIGHT, watching
from mixprec.recipes import Recipe

Figures = dict[str, dict[str, dict[str, float]]]  # by layer, product and recipe


def divergences(task: Task, plan: Any, formats: tuple[str, ...], batches: int = 8) -> Figures:
    """Of the layers of a plan of this task."""
    layers = {name: task.model.get_submodule(name) for name in plan.measured}
    recipes = {name: Recipe.parse(name) for name in formats}
    lr = task.optimizer.param_groups[0]["lr"]
    found: Figures = {name: defaultdict(lambda: defaultdict(float)) for name in layers}
    update = defaultdict[str, float](float)  # of the weights, as a part of them
    order: dict[str, None] = {}  # the last layer first
    loss = 0.0

    def note(name: str, m: Any, products: list[str]) -> None:
        order[name] = None
        weight: Any = layers[name].weight
        second = task.optimizer.state[weight]["exp_avg_sq"].reshape(weight.shape).flatten(1)
        adaptive = lr / (second.sqrt() + 1e-8) / weight.norm()
        for product in products:
            exact = m.product(product, None)
            if product == GRAD_WEIGHT:
                update[name] += float((adaptive * exact).norm()) / batches
            for recipe, how in recipes.items():
                error = m.product(product, how) - exact
                if product == FORWARD:
                    harm = m.g.norm() * error.norm() / math.sqrt(error.numel())
                elif product == GRAD_WEIGHT:
                    harm = (adaptive * error).norm()
                else:
                    harm = error.norm() / exact.norm()
                found[name][product][recipe] += float(harm) / batches

    for batch in task.after[:batches]:
        with watching(layers, note):
            value = task.model(*batch)
            value.backward()
        loss += float(value.detach()) / batches
        task.model.zero_grad()
    for i, name in enumerate(order):
        before = sum(update[other] for other in itertools.islice(order, i + 1, None))
        for recipe in recipes:
            found[name][FORWARD][recipe] /= loss
            if GRAD_INPUT in found[name]:
                found[name][GRAD_INPUT][recipe] *= before
    return found


def choose(task: Task, plan: Any, formats: tuple[str, ...], limit: float) -> Any:
    """The assignment for a limit of time, in units of the plan's program."""
    costs = {name: Costs(**row["costs"]) for name, row in plan.measured.items()}
    program = Program(divergences(task, plan, formats), costs)
    return program.solve(["loss", "time"], {"time": limit})
