"""How much the loss grows if a product of a layer is computed in a format.

forward: the output y of a layer is off by e. With errors of mean 0, independent of each other, the
loss grows by 1/2 sum(H e^2), and H, the diagonal of the loss's second derivative, is estimated by
Fisher's information: c S G^2, for the gradient G of a loss that is the mean of S terms. c would be
1 for a negative log-likelihood and errors that do not depend on G; it is measured, for any loss, by
computing the forward products of all layers in the format that does most harm.

backward: a gradient of a weight is off by d in each step, and the weight, after T steps of learning
rate r, by about r P sqrt(T) d, where the optimizer multiplies gradients by P: 1 in SGD, 1 / sqrt(v)
in Adam. The loss grows by 1/2 sum(c S v r^2 P^2 T d^2), v the mean of the gradient's squares. An
error in the gradient of a layer's input reaches the gradients of the weights before it; how far is
measured with a random one.

Sources: SNIP (arXiv 2602.01410) for the loss and the weights as the two ways in which formats do
harm; HAWQ-V2 (Dong et al., 2020) for the second-order estimate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...ops._dispatch import autocast
from ...recipes import GEMMS, Recipe
from ..audit import Audit
from ..audit.loss import power
from ..audit.ops import BACKWARD
from ..audit.ops import FORWARD as FORWARD_PASS
from ..layers import Matrices, after_forward, first

FORWARD, GRAD_INPUT, GRAD_WEIGHT = GEMMS
_CHECKED = 4  # batches whose loss is measured with a format in all layers
Run = Callable[[int], torch.Tensor]  # the loss of the i-th batch


@dataclass
class Layer:
    """Of a layer, in all batches: flops of each product; the numbers of elements of x, w and y; by
    product and recipe, harm, the mean growth of the loss, and first, the first-order term of
    forward's alone; reach: of a gradient of the input that is off by as much as it is large."""

    name: str
    module: nn.Module
    flops: int = 0
    x: int = 0
    w: int = 0
    y: int = 0
    harm: dict[str, dict[str, float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    off: dict[str, float] = field(default_factory=dict)  # grad_input's squared error, relative
    reach: float = 0.0

    def add(self, product: str, recipe: str, value: float) -> None:
        of = self.harm.setdefault(product, defaultdict(float))
        of[recipe] += value


@dataclass(frozen=True)
class Training:
    """steps: T, of the training that is planned; lr: r; is_adaptive: gradients are divided by the
    root of their mean squares; terms: S, None: the rows of the product that ran last."""

    steps: int
    lr: float
    is_adaptive: bool
    terms: int | None = None

    def harm(self, error: torch.Tensor, grad: torch.Tensor, terms: int) -> float:
        """Of a gradient that is off by `error` in each step."""
        weighted = error if self.is_adaptive else error * grad
        return 0.5 * self.steps * self.lr**2 * terms * power(weighted)


def measure(
    layers: Mapping[str, nn.Module],
    params: Sequence[torch.Tensor],
    run: Run,
    batches: int,
    recipes: Mapping[str, Recipe],
    training: Training,
    passes: int,
    progress: Callable[[int, int], object],
    audit: Audit,
) -> dict[str, Layer]:
    """Of the layers that run with a gradient, by name, in `passes` forward and backward passes.
    audit: records one of them."""
    found = {name: Layer(name, module) for name, module in layers.items()}
    terms, order = 0, dict[str, None]()  # the last layer first
    checked = min(batches, _CHECKED)
    probes = min(len(layers), passes - batches - checked - 1)
    total = batches + checked + 1 + probes

    def note(name: str, matrices: Matrices, products: list[str]) -> None:
        nonlocal terms
        terms = training.terms or terms or matrices.g.shape[0]  # of the product that ran last
        order[name] = None
        _measure(found[name], matrices, products, recipes, training, terms, batches)

    for i in range(batches):
        with watching(layers, note):
            _gradients(params, run, i)
        progress(i + 1, total)
    curvature = _curvature(layers, found, recipes, run, checked)
    progress(batches + checked, total)
    # Of the gradients of inputs, as many as there are passes for.
    reached = [name for name in order if found[name].off]
    chosen = _spread(reached, probes)
    with audit:
        exact = _gradients(params, run, 0)
    for i, name in enumerate(chosen):
        found[name].reach = _reach(layers[name], params, exact, run, training, terms)
        progress(total - len(chosen) + i + 1, total)
    _interpolate([found[name] for name in reached], set(chosen))
    for layer in found.values():
        for recipe, off in layer.off.items():
            layer.add(GRAD_INPUT, recipe, off * layer.reach / batches)
        layer.harm = {
            p: {recipe: curvature * value for recipe, value in layer.harm[p].items()}
            for p in GEMMS
            if p in layer.harm
        }
    return {name: found[name] for name in order}


def others(audit: Audit, layers: Mapping[str, Layer]) -> int:
    """The FLOPs of a step that are not of these layers' products: of their own, as many as are in
    the audit."""
    ops = [op for op in audit.ops if op.phase in (FORWARD_PASS, BACKWARD)]
    own = sum(op.flops for op in ops if op.module in layers)
    planned = sum(layer.flops * len(layer.harm) for layer in layers.values())
    return round((sum(op.flops for op in ops) - own) * planned / own) if own else 0


def _curvature(
    layers: Mapping[str, nn.Module],
    found: Mapping[str, Layer],
    recipes: Mapping[str, Recipe],
    run: Run,
    batches: int,
) -> float:
    """c: by how much the loss grows with the format that does most harm in the forward products of
    all layers, as a part of what is estimated; 1 where it does not grow."""
    sums = {name: sum(f.harm[FORWARD][name] for f in found.values() if f.harm) for name in recipes}
    worst = max(sums, key=lambda name: sums[name])

    def off(_: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        with autocast.disabled(y.device.type):
            m = Matrices.of_layer(module, x, weight, y)
            error = m.product(FORWARD, recipes[worst]) - m.product(FORWARD, None)
            return y + m.shaped(error, y, module).to(y.dtype)

    with torch.no_grad():
        before = sum(float(run(i)) for i in range(batches))
        with after_forward(layers, off):
            after = sum(float(run(i)) for i in range(batches))
    grown = (after - before) / batches
    return grown / sums[worst] if grown > 0.0 < sums[worst] else 1.0


def _measure(
    layer: Layer,
    m: Matrices,
    products: list[str],
    recipes: Mapping[str, Recipe],
    training: Training,
    terms: int,
    batches: int,
) -> None:
    layer.flops += m.flops // batches
    layer.x += m.x.numel() // batches
    layer.y += m.g.numel() // batches
    layer.w = m.w.numel()
    for product in products:
        exact = m.product(product, None)
        for name, recipe in recipes.items():
            error = m.product(product, recipe) - exact
            if product == FORWARD:
                moved = error * m.g
                layer.add(product, name, 0.5 * terms * power(moved) / batches)
                layer.first[name] = layer.first.get(name, 0.0) + float(moved.sum()) / batches
            elif product == GRAD_WEIGHT:
                layer.add(product, name, training.harm(error, exact, terms) / batches)
            else:
                relative = power(error) / max(power(exact), 1e-300)
                layer.off[name] = layer.off.get(name, 0.0) + relative


def _reach(
    layer: nn.Module,
    params: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor | None],
    run: Run,
    training: Training,
    terms: int,
) -> float:
    """The harm of a gradient of the layer's input to which as much noise is added, row by row."""

    def disturbed(g: torch.Tensor) -> torch.Tensor:
        size = g.float().square().mean(-1, keepdim=True).sqrt()
        return g + (torch.randn_like(g, dtype=torch.float32) * size).to(g.dtype)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = first(args, kwargs)
        if not x.requires_grad:
            return None
        other = x.view_as(x)
        other.register_hook(disturbed)
        if args:
            return (other, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): other}

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        found = _gradients(params, run, 0)
    finally:
        handle.remove()
    return sum(
        training.harm(a.float() - b.float(), b.float(), terms)
        for a, b in zip(found, exact, strict=True)
        if a is not None and b is not None
    )


def _gradients(params: Sequence[torch.Tensor], run: Run, i: int) -> list[torch.Tensor | None]:
    for p in params:
        p.grad = None
    run(i).backward()
    found = [p.grad for p in params]
    for p in params:
        p.grad = None
    return found


def watching(
    layers: Mapping[str, nn.Module], note: Callable[[str, Matrices, list[str]], None]
) -> AbstractContextManager[None]:
    """Call note(name, what the layer computes with, the products that it computes) of each call of
    a layer, in the order of the backward pass."""

    def hook(name: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        value, weight = x.detach(), module.weight
        assert isinstance(weight, torch.Tensor)
        needs = {FORWARD: True, GRAD_INPUT: x.requires_grad, GRAD_WEIGHT: weight.requires_grad}
        products = [name for name, needed in needs.items() if needed]

        def after(g: torch.Tensor) -> None:
            with torch.no_grad(), autocast.disabled(g.device.type):
                note(name, Matrices.of_layer(module, value, weight, g), products)

        if y.requires_grad:
            y.register_hook(after)

    return after_forward(layers, hook)


def _spread(names: Sequence[str], most: int) -> list[str]:
    """So many of them, evenly, with the first and the last."""
    if len(names) <= most:
        return list(names)
    if most < 2:
        return list(names[:most])
    step = (len(names) - 1) / (most - 1)
    return [names[round(i * step)] for i in range(most)]


def _interpolate(layers: Sequence[Layer], measured: set[str]) -> None:
    """The reach of those between, evenly between the logarithms of the measured ones."""
    known = [i for i, layer in enumerate(layers) if layer.name in measured]
    for i, layer in enumerate(layers):
        if layer.name in measured or not known:
            continue
        before = max((k for k in known if k < i), default=known[0])
        after = min((k for k in known if k > i), default=known[-1])
        low, high = (math.log(max(layers[k].reach, 1e-300)) for k in (before, after))
        share = 0.5 if after == before else (i - before) / (after - before)
        layer.reach = math.exp(low + share * (high - low))
