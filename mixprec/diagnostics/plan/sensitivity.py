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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...ops._dispatch import autocast
from ...recipes import GEMMS, Recipe
from ..audit import Audit
from ..audit.records import BACKWARD, power
from ..audit.records import FORWARD as FORWARD_PASS
from ..layers import Matrices, after_forward, first

FORWARD, GRAD_INPUT, GRAD_WEIGHT = GEMMS
_CHECKED = 4  # batches whose loss is measured with a format in all layers


@dataclass
class Layer:
    """Of a layer, in all batches: flops of each product; the numbers of elements of x and w; by
    product and recipe, harm, the mean growth of the loss, and first, the first-order term of
    forward's alone; reach: of a gradient of the input that is off by as much as it is large."""

    name: str
    module: nn.Module
    flops: int = 0
    x: int = 0
    w: int = 0
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
    root of their mean squares."""

    steps: int
    lr: float
    is_adaptive: bool

    def harm(self, error: torch.Tensor, grad: torch.Tensor, terms: int) -> float:
        """Of a gradient that is off by `error` in each step."""
        weighted = error if self.is_adaptive else error * grad
        return 0.5 * self.steps * self.lr**2 * terms * power(weighted)


class Sensitivities:
    """Those of layers of a model, by name. run: the loss of the i-th of so many batches."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        params: Sequence[torch.Tensor],
        run: Callable[[int], torch.Tensor],
        batches: int,
        recipes: Mapping[str, Recipe],
        training: Training,
    ) -> None:
        self._modules, self._params, self._run = layers, params, run
        self._batches, self._recipes, self._training = batches, recipes, training
        self._layers = {name: Layer(name, module) for name, module in layers.items()}
        self._terms = 0  # S: the rows of the product that ran last
        self._order: dict[str, None] = {}  # of backward: the last layer first

    def measure(
        self, passes: int, progress: Callable[[int, int], object], audit: Audit
    ) -> dict[str, Layer]:
        """Of the layers that run with a gradient, in so many forward and backward passes. audit:
        records one of them."""
        batches, checked = self._batches, min(self._batches, _CHECKED)
        probes = min(len(self._layers), passes - batches - checked - 1)
        total = batches + checked + 1 + probes
        for i in range(batches):
            with after_forward(self._modules, self._watch):
                self._gradients(i)
            progress(i + 1, total)
        curvature = self._curvature(checked)
        progress(batches + checked, total)
        # Of the gradients of inputs, as many as there are passes for.
        reached = [name for name in self._order if self._layers[name].off]
        chosen = _spread(reached, probes)
        with audit:
            exact = self._gradients(0)
        for i, name in enumerate(chosen):
            self._layers[name].reach = self._reach(self._modules[name], exact)
            progress(total - len(chosen) + i + 1, total)
        _interpolate([self._layers[name] for name in reached], set(chosen))
        for layer in self._layers.values():
            for recipe, off in layer.off.items():
                layer.add(GRAD_INPUT, recipe, off * layer.reach / batches)
            layer.harm = {
                p: {recipe: curvature * value for recipe, value in layer.harm[p].items()}
                for p in GEMMS
                if p in layer.harm
            }
        return {name: self._layers[name] for name in self._order}

    def _watch(self, name: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        """After a call of a layer: measure it in the backward pass."""
        value, weight = x.detach(), module.weight
        assert isinstance(weight, torch.Tensor)
        needs = {FORWARD: True, GRAD_INPUT: x.requires_grad, GRAD_WEIGHT: weight.requires_grad}

        def after(g: torch.Tensor) -> None:
            with torch.no_grad(), autocast.disabled(g.device.type):
                matrices = Matrices.of_layer(module, value, weight, g)
                self._add(self._layers[name], matrices, [p for p in GEMMS if needs[p]])

        if y.requires_grad:
            y.register_hook(after)

    def _add(self, layer: Layer, m: Matrices, products: list[str]) -> None:
        batches, training = self._batches, self._training
        self._terms = terms = self._terms or m.g.shape[0]
        self._order[layer.name] = None
        layer.flops += m.flops // batches
        layer.x += m.x.numel() // batches
        layer.w = m.w.numel()
        for product in products:
            exact = m.product(product, None)
            for name, recipe in self._recipes.items():
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

    def _curvature(self, batches: int) -> float:
        """c: by how much the loss grows with the format that does most harm in the forward products
        of all layers, as a part of what is estimated; 1 where it does not grow."""
        measured = [layer for layer in self._layers.values() if layer.harm]
        sums = {
            name: sum(layer.harm[FORWARD][name] for layer in measured) for name in self._recipes
        }
        worst = max(sums, key=lambda name: sums[name])

        def off(_: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            with autocast.disabled(y.device.type):
                m = Matrices.of_layer(module, x, weight, y)
                error = m.product(FORWARD, self._recipes[worst]) - m.product(FORWARD, None)
                return y + m.shaped(error, y, module).to(y.dtype)

        with torch.no_grad():
            before = sum(float(self._run(i)) for i in range(batches))
            with after_forward(self._modules, off):
                after = sum(float(self._run(i)) for i in range(batches))
        grown = (after - before) / batches
        return grown / sums[worst] if grown > 0.0 < sums[worst] else 1.0

    def _reach(self, module: nn.Module, exact: Sequence[torch.Tensor | None]) -> float:
        """The harm of a gradient of the layer's input to which as much noise is added, row by
        row."""

        def disturbed(g: torch.Tensor) -> torch.Tensor:
            size = g.float().square().mean(-1, keepdim=True).sqrt()
            return g + (torch.randn_like(g, dtype=torch.float32) * size).to(g.dtype)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            x = first(args, kwargs)
            if not x.requires_grad:
                return None
            other = x.view_as(x)
            other.register_hook(disturbed)
            if args:
                return (other, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): other}

        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        try:
            grads = self._gradients(0)
        finally:
            handle.remove()
        return sum(
            self._training.harm(a.float() - b.float(), b.float(), self._terms)
            for a, b in zip(grads, exact, strict=True)
            if a is not None and b is not None
        )

    def _gradients(self, i: int) -> list[torch.Tensor | None]:
        for p in self._params:
            p.grad = None
        self._run(i).backward()
        grads = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None
        return grads


def unplanned_flops(audit: Audit, layers: Mapping[str, Layer]) -> int:
    """The FLOPs of a step that are not of these layers' products: of their own, as many as are in
    the audit."""
    ops = [op for op in audit.ops if op.phase in (FORWARD_PASS, BACKWARD)]
    listed = sum(op.flops for op in ops if op.module in layers)
    planned = sum(layer.flops * len(layer.harm) for layer in layers.values())
    return round((sum(op.flops for op in ops) - listed) * planned / listed) if listed else 0


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
