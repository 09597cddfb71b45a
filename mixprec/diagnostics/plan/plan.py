"""plan: the format of every product of a model, chosen by measurement."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.compress_saved import Bits
from ...nn._layer import Layer as Converted
from ...nn.autocast import autocast
from ...nn.convert import convert
from ...nn.kinds import adapters, layer_for
from ...ops._dispatch import checks
from ...optim import SGD
from ...recipes import GEMMS, Recipe
from .. import plotting
from ..batches import call, scalar_loss
from ..unchanged import as_before
from . import hardware as processors
from . import text
from .assignment import QUANTITIES, Assignment, Program
from .cost import Costs, costs
from .hardware import Hardware
from .matrices import why_not
from .sensitivity import Training, measure

_BATCHES = 8
# Of a limit of the loss: it may grow by more than predicted, also by more than this (docs/plan.md).
_MARGIN = 2.0
_FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4", "bf16")
_PREFIX = {"grad_input": "+gi-", "grad_weight": "+gw-"}


@dataclass
class Plan:
    """A recipe for each layer of a model.

    recipes: by layer, as `mixprec.convert` takes them; shapes: of their weights; budget: what
    was asked for; predicted: "loss", how much it grows over the planned training,
    and "time" and "memory", as parts of those of bf16; left_out: layers and formats that were not
    planned, and why; measured: by layer and product, what the plan was made of.
    """

    recipes: dict[str, str]
    shapes: dict[str, list[int]]
    budget: dict[str, float]
    predicted: dict[str, float]
    bf16: dict[str, float]
    hardware: str
    left_out: dict[str, str] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What `mixprec.compare` calls it."""
        return f"plan, {text.limits(self.budget)}"

    def apply(
        self, model: nn.Module, *, saved: Bits | None = None, fuse: bool = False
    ) -> nn.Module:
        """`mixprec.convert` the model, in place, with the recipe of each layer; what the plan has
        left out gets bf16. At any step of a training run. saved, fuse: as in `convert`. ValueError
        names the first layer that this model does not have as the planned one has it."""
        found = _layers(model)
        for name, shape in self.shapes.items():
            weight: Any = getattr(found.get(name), "weight", None)
            got = "none of that name" if weight is None else f"one of {list(weight.shape)}"
            if weight is None or list(weight.shape) != shape:
                raise ValueError(
                    f"plan: this model must have a layer {name!r} with a weight of shape {shape}, "
                    f"as the one that was planned, got {got}"
                )
        if more := [name for name in found if name not in {*self.shapes, *self.left_out}]:
            raise ValueError(f"plan: this model has a layer {more[0]!r} that was not planned")
        overrides = {_escaped(name): recipe for name, recipe in self.recipes.items()}
        return convert(model, "bf16", overrides=overrides, saved=saved, fuse=fuse)

    def assignment(self) -> Assignment:
        """The name of the recipe of each product, by layer."""
        return {
            name: {p: _named(recipe, p) for p in self.measured[name]["harm"]}
            for name, recipe in self.recipes.items()
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
        recipes = {name: _joined(products) for name, products in assignment.items()}
        predicted = _predicted(self.program(), assignment, self.bf16)
        return replace(self, recipes=recipes, predicted=predicted)

    def program(self) -> Program:
        """What the plan was solved with, for other budgets."""
        harm = {name: row["harm"] for name, row in self.measured.items()}
        return Program(harm, {name: Costs(**row["costs"]) for name, row in self.measured.items()})

    def table(self) -> str:
        """A line for each layer: the recipes of its products, its part of the loss and of the
        FLOPs."""
        return text.table(self)

    def why(self, layer: str) -> str:
        """Why each product of a layer has its recipe: what the next cheaper one would add to the
        loss, and what the next better one would cost."""
        return text.why(self, layer)

    def __str__(self) -> str:
        return f"{text.summary(self)}\n\n{self.table()}"

    def front(self, points: int = 16) -> list[tuple[float, float]]:
        """(time, loss): the smallest loss that is predicted for each time, from the shortest to
        that of bf16, without other limits."""
        program, total = self.program(), self.bf16["time"]
        fastest = program.solve(["time", "loss"], {})
        assert fastest is not None, "without limits"
        least, found = program.value("time", fastest), dict[float, float]()
        for i in range(points):
            limit = least + (total - least) * i / (points - 1)
            best = program.solve(["loss", "time"], {"time": limit * (1 + 1e-9)})
            if best is not None:
                found[program.value("time", best) / total] = program.value("loss", best)
        return sorted(found.items())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw `front`, with this plan and the recipes that all products can have, to a PNG, SVG or
        PDF file. ImportError without matplotlib."""
        program, total = self.program(), self.bf16["time"]
        names = next(iter(next(iter(self.measured.values()))["harm"].values()))
        points = {}
        for name in names:
            uniform = program.uniform(name)
            points[name] = program.value("time", uniform) / total, program.value("loss", uniform)
        points["plan"] = self.predicted["time"], self.predicted["loss"]
        unit = f" on {self.hardware}" if self.hardware else ""
        plotting.save(plotting.plot_plan(self.front(), points, unit), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON. `recipes` may be edited."""
        Path(path).write_text(json.dumps({"version": 1, **asdict(self)}, indent=1))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written. The prediction is that of the recipes in the file."""
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict) or found.pop("version", None) != 1:
            raise ValueError(f"Plan.load: {path} must be a file of Plan.save, of version 1")
        plan = Plan(**found)
        for recipe in plan.recipes.values():
            Recipe.parse(recipe)
        return plan.replaced(plan.assignment())


def _named(recipe: str, product: str) -> str:
    """The recipe of a product, of a name like "fp8+gi-bf16"."""
    own, *others = Recipe.parse(recipe).name.split("+")
    prefix = _PREFIX.get(product, "+")[1:]
    mine = (o.removeprefix(prefix) for o in others if prefix and o.startswith(prefix))
    return Recipe.parse(next(mine, own)).name


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those that convert takes."""
    added = adapters(model)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in added and (isinstance(module, Converted) or layer_for(module))
    }


def _joined(products: Mapping[str, str]) -> str:
    """The name of a layer's recipe."""
    own = products[GEMMS[0]]
    others = (p for p in _PREFIX if products.get(p, own) != own)
    return own + "".join(f"{_PREFIX[p]}{products[p]}" for p in others)


def _predicted(
    program: Program, assignment: Assignment, bf16: Mapping[str, float]
) -> dict[str, float]:
    return {
        name: program.value(name, assignment) / (1.0 if name == "loss" else bf16[name] or 1.0)
        for name in QUANTITIES
    }


def plan(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    budget: Mapping[str, float],
    formats: Iterable[Recipe | str] = _FORMATS,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 1000,
    hardware: str | Hardware | None = None,
    passes: int = 60,
    progress: Callable[[int, int], object] | None = None,
) -> Plan:
    """Choose a format for each product of each layer, such that a budget is kept.

    budget: limits, of some of "loss", how much it may grow by, of which half is left for what the
    prediction is off by; "time", of the products and casts of a step, and "memory", kept for the
    backward pass, as parts of those of bf16. With a limit of the loss the time is the least
    possible, otherwise the loss is. formats: recipes to choose from, and bf16. hardware: "h100",
    "h200", "b200", "a100" or "rtx4090", whose rates and bandwidth make the time, and which leave
    out formats that they have no instructions for; None: a product of half the bits takes half the
    time.

    model: as it is trained; layers of mixprec compute as torch's while they are measured. batches:
    as `mixprec.compare` takes them, of which the first 8 are read. loss: a function of the model's
    output; None: the output, or its `loss`. optimizer: whose learning rate and kind decide what an
    error of a gradient does (torch's and mixprec's SGD; all others count as Adam); None: Adam with
    1e-3. steps: how long the training is that the loss is predicted for. passes: the most forward
    and backward passes, 4 or more: one a batch, the rest for layers, evenly chosen if there are
    more. progress(done, total) is called after each.

    Sensitivities are those of mixprec.diagnostics.plan.sensitivity, the integer program is solved
    exactly (scipy.optimize.milp). The model, its gradients, buffers and the random state are as
    before. Needs scipy: pip install 'mixprec[plan]'. Layers of several products (attention of
    torch, experts) and convolutions that are not 1 x 1 are left out, and stay in bf16.

    ValueError: a budget that nothing keeps (with the least that would do), a loss that is not a
    finite number, unknown hardware, no layer to plan.
    """
    checks.is_module("plan", model)
    limits = _budget(budget)
    processor = processors.parse(hardware)
    recipes, left_out = processors.choose(formats, processor)
    if not isinstance(passes, int) or passes < 4:
        raise ValueError(f"plan: passes must be an int of 4 or more, got {passes!r}")
    # A third of the passes or more are for gradients of inputs.
    data = batches() if callable(batches) else batches
    taken = list(itertools.islice(data, min(_BATCHES, max((passes - 2) // 3, 1))))
    if not taken:
        raise ValueError("plan: batches must have at least one")
    layers = _layers(model)
    reasons = {name: reason for name, m in layers.items() if (reason := why_not(m)) is not None}
    left_out |= reasons
    layers = {name: module for name, module in layers.items() if name not in reasons}
    if not layers:
        raise ValueError("plan: there is no layer to plan: nn.Linear, or a 1 x 1 convolution")

    def run(i: int) -> torch.Tensor:
        torch.manual_seed(0)  # the same dropout in each pass
        output = call(model, taken[i])
        remedy = "give plan(..., loss=function of the output)"
        value = scalar_loss("plan", output if loss is None else loss(output), remedy)
        if not math.isfinite(got := float(value.detach())):
            raise ValueError(f"plan: the loss must be a finite number, got {got} of batch {i}")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ValueError("plan: the loss has no gradient: no parameter requires one")
        return value

    params = [p for p in model.parameters() if p.requires_grad]
    with as_before(model), torch.enable_grad(), autocast(enabled=False):
        found = measure(
            layers, params, run, len(taken), recipes, _training(optimizer, steps), passes,
            progress or (lambda done, total: None),
        )  # fmt: skip
    left_out |= {name: "it did not run with a gradient" for name in layers if name not in found}
    if not found:
        raise ValueError("plan: no layer ran with a gradient")
    found = {name: found[name] for name in layers if name in found}
    prices = {name: costs(layer, recipes, processor) for name, layer in found.items()}
    program = Program({name: layer.harm for name, layer in found.items()}, prices)
    bf16 = {name: program.value(name, program.uniform("bf16")) for name in QUANTITIES}
    chosen = _solve(program, limits, bf16)
    return Plan(
        recipes={name: _joined(products) for name, products in chosen.items()},
        shapes={name: list(layers[name].weight.shape) for name in found},  # type: ignore[arg-type]
        budget=limits,
        predicted=_predicted(program, chosen, bf16),
        bf16=bf16,
        hardware=processor.name,
        left_out=left_out,
        measured={
            name: {
                "flops": layer.flops,
                "harm": {p: dict(of) for p, of in layer.harm.items()},
                "first": layer.first,
                "costs": asdict(prices[name]),
            }
            for name, layer in found.items()
        },
    )


def _budget(budget: Mapping[str, float]) -> dict[str, float]:
    valid = isinstance(budget, Mapping) and budget and {*budget} <= {*QUANTITIES}
    if not valid or not all(isinstance(v, (int, float)) and v >= 0 for v in budget.values()):
        raise ValueError(
            f"plan: budget must be limits of some of {QUANTITIES}, such as "
            f'{{"time": 0.7}}, got {budget!r}'
        )
    return {name: float(budget[name]) for name in QUANTITIES if name in budget}


def _objectives(limits: Mapping[str, float]) -> tuple[str, ...]:
    return ("time", "loss", "memory") if "loss" in limits else ("loss", "time", "memory")


def _training(optimizer: torch.optim.Optimizer | None, steps: int) -> Training:
    if optimizer is None:
        return Training(steps, 1e-3, True)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    is_plain = type(optimizer) in (torch.optim.SGD, SGD)
    return Training(steps, sum(rates) / len(rates), not is_plain)


def _solve(program: Program, limits: Mapping[str, float], bf16: Mapping[str, float]) -> Assignment:
    units = dict(bf16) | {"loss": 1.0 / _MARGIN}
    absolute = {name: limit * units[name] for name, limit in limits.items()}
    found = program.solve(_objectives(limits), absolute)
    if found is not None:
        return found
    said = []
    for name in limits:
        least = program.solve([name], {n: v for n, v in absolute.items() if n != name})
        if least is not None:
            said.append(f"{name} {program.value(name, least) / (units[name] or 1.0):.4g}")
    raise ValueError(
        f"plan: no assignment keeps {text.limits(limits)}"
        + (f": with the others kept, the least is {' or '.join(said)}" if said else "")
    )
