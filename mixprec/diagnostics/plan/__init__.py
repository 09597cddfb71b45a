"""plan: the format of every product of a model, chosen by measurement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..._checkpoint_file import random_states_kept
from ...nn.autocast import autocast
from ...ops._dispatch import checks
from ...optim import SGD
from ...recipes import Recipe
from ..audit import Audit
from ..layers import why_not_matrices
from ..passes import restored, scalar_loss
from ..writers import Progress
from .program import QUANTITIES, Assignment, Program, choose, costs
from .result import Plan, convertible, joined, limits_text, prediction
from .sensitivity import Sensitivities, Training, unplanned_flops

_BATCHES = 8
# Of a limit of the loss: it may grow by more than predicted, also by more than this (docs/plan.md).
_MARGIN = 2.0
_FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4-1x16", "bf16")


def plan(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    budget: Mapping[str, float],
    formats: Iterable[Recipe | str] = _FORMATS,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 1000,
    passes: int = 60,
    progress: Callable[[int, int], object] | None = None,
) -> Plan:
    """Choose a format for each product of each layer, such that a budget is kept.

    budget: limits, of some of "loss", how much it may grow by, of which half is left for what the
    prediction is off by; "time", of all products of a step, also of those that are not planned, as
    a part of that of bf16, where a product of half the bits takes half the time; "memory", what the
    planned layers keep for the backward pass, as a part of the same in bf16. With a limit of the
    loss the time is the least possible, otherwise the loss is. formats: recipes to choose from, and
    bf16.

    model: as it is trained; layers of mixprec compute as torch's while they are measured. batches:
    a list, a DataLoader, or a function that returns an iterable, of which the first 8 are read; a
    batch is a tuple or list of forward's arguments, a dict (or another mapping) of its keyword
    arguments, or one tensor. loss: a function of the model's output; None: the output, or its
    `loss`. optimizer: whose learning rate and kind decide what an error of a gradient does (torch's
    and mixprec's SGD; all others count as Adam); None: Adam with 1e-3. steps: how long the training
    is that the loss is predicted for. passes: the most forward and backward passes, 4 or more: one
    a batch, the rest for layers, evenly chosen if there are more. progress(done, total) is called
    after each; None: a line on stderr says it, where that is a terminal.

    Sensitivities are those of mixprec.diagnostics.plan.sensitivity, the integer program is solved
    exactly (scipy.optimize.milp). The model, its gradients, buffers and the random state are as
    before. Needs scipy: pip install 'mixprec[plan]'. Layers of several products (attention of
    torch, experts) and convolutions that are not 1 x 1 are left out, and stay in bf16.

    ValueError: a budget that nothing keeps (with the least that would do), a loss that is not a
    finite number, no layer to plan.
    """
    checks.is_module("plan", model)
    limits = _budget(budget)
    recipes = choose(formats)
    if not isinstance(passes, int) or passes < 4:
        raise ValueError(f"plan: passes must be an int of 4 or more, got {passes!r}")
    # A third of the passes or more are for gradients of inputs.
    count = min(_BATCHES, max((passes - 2) // 3, 1))
    with random_states_kept():  # which a DataLoader draws from
        taken = list(itertools.islice(batches() if callable(batches) else batches, count))
    if not taken:
        raise ValueError("plan: batches must have at least one")
    layers = convertible(model)
    left_out = {name: why for name, m in layers.items() if (why := why_not_matrices(m))}
    layers = {name: module for name, module in layers.items() if name not in left_out}
    if not layers:
        raise ValueError("plan: there is no layer to plan: nn.Linear, or a 1 x 1 convolution")

    def run(i: int) -> torch.Tensor:
        torch.manual_seed(0)  # the same dropout in each pass
        remedy = "give plan(..., loss=function of the output)"
        value = scalar_loss("plan", model, taken[i], loss, remedy)
        if not math.isfinite(got := float(value.detach())):
            raise ValueError(f"plan: the loss must be a finite number, got {got} of batch {i}")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ValueError("plan: the loss has no gradient: no parameter requires one")
        return value

    params = [p for p in model.parameters() if p.requires_grad]
    audit, training = Audit(model), _training(optimizer, steps)
    with restored(model), torch.enable_grad(), autocast(enabled=False), Progress() as line:

        def show(done: int, total: int) -> None:
            line.show(f"plan: {done} of {total} passes")

        sensitivities = Sensitivities(layers, params, run, len(taken), recipes, training)
        measured = sensitivities.measure(passes, progress or show, audit)
    left_out |= {name: "it did not run with a gradient" for name in layers if name not in measured}
    if not measured:
        raise ValueError("plan: no layer ran with a gradient")
    measured = {name: measured[name] for name in layers if name in measured}
    prices = {name: costs(layer, recipes) for name, layer in measured.items()}
    program = Program({name: layer.harm for name, layer in measured.items()}, prices)
    bf16 = {name: program.value(name, program.uniform("bf16")) for name in QUANTITIES}
    rest = unplanned_flops(audit, measured)
    chosen = _solve(program, limits, bf16, rest)
    return Plan(
        recipes={name: joined(products) for name, products in chosen.items()},
        shapes={name: list(layers[name].weight.shape) for name in measured},  # type: ignore[arg-type]
        budget=limits,
        predicted=prediction(program, chosen, bf16, rest),
        bf16=bf16,
        rest=rest,
        left_out=left_out,
        measured={
            name: {
                "flops": layer.flops,
                "harm": {p: dict(of) for p, of in layer.harm.items()},
                "first": layer.first,
                "costs": asdict(prices[name]),
            }
            for name, layer in measured.items()
        },
    )


def _budget(budget: Mapping[str, float]) -> dict[str, float]:
    valid = isinstance(budget, Mapping) and budget and {*budget} <= {*QUANTITIES}
    if not valid or not all(type(v) in (int, float) and v >= 0 for v in budget.values()):
        raise ValueError(
            f"plan: budget must be limits of some of {QUANTITIES}, such as "
            f'{{"time": 0.7}}, got {budget!r}'
        )
    return {name: float(budget[name]) for name in QUANTITIES if name in budget}


def _training(optimizer: torch.optim.Optimizer | None, steps: int) -> Training:
    if optimizer is None:
        return Training(steps, 1e-3, True)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    is_plain = type(optimizer) in (torch.optim.SGD, SGD)
    return Training(steps, sum(rates) / len(rates), not is_plain)


def _solve(
    program: Program,
    limits: Mapping[str, float],
    bf16: Mapping[str, float],
    rest: float,
) -> Assignment:
    units = dict(bf16) | {"loss": 1.0 / _MARGIN, "time": bf16["time"] + rest}
    fixed = {"time": rest}
    absolute = {name: v * units[name] - fixed.get(name, 0.0) for name, v in limits.items()}
    first = ("time", "loss") if "loss" in limits else ("loss", "time")
    assignment = program.solve((*first, "memory"), absolute)
    if assignment is not None:
        return assignment
    said = []
    for name in limits:
        least = program.solve([name], {n: v for n, v in absolute.items() if n != name})
        if least is not None:
            value = program.value(name, least) + fixed.get(name, 0.0)
            said.append(f"{name} {value / (units[name] or 1.0):.4g}")
    share = rest / (units["time"] or 1.0) if "time" in limits else 0.0
    raise ValueError(
        f"plan: no assignment keeps {limits_text(limits)}"
        + (f": with the others kept, the least is {' or '.join(said)}" if said else "")
        + (f"; {share:.1%} of the time is of products that are not planned" if share else "")
    )
