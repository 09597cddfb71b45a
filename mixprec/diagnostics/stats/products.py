"""The SQNR against FP32 of each layer's three products with a recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ...nn import _region
from ...recipes import ROLES, Recipe
from ..unchanged import unchanged
from .layers import (
    as_operand,
    measured_layers,
    product_fp32,
    say_what_is_left_out,
    state_here,
)
from .measure import FIELDS, cast_sums, decibels, squares

PRODUCTS = ("y", "grad_input", "grad_weight")
Sqnr = dict[str, float | None]

# The SQNR in dB that an FP8 product should reach: the thresholds of torchao's tests.
BARS = {"y": 18.0, "grad_weight": 17.0}
REMEDIES = ("fp8-rowwise", "bf16")  # in this order


def below_bar(sqnr: Sqnr) -> dict[str, float]:
    """The products below their threshold, or with Inf or NaN where FP32 has none."""
    found = {name: sqnr.get(name) for name in BARS}
    return {n: value for n, value in found.items() if value is not None and not value >= BARS[n]}


@torch.enable_grad()
def product_sqnr(
    layer: nn.Module, x: torch.Tensor, g: torch.Tensor, recipe: Recipe | None = None
) -> Sqnr:
    """SQNR in dB of each cast of `layer` (x, w, g) and of its results y, grad_input and
    grad_weight, against the same products of the same tensors in FP32.

    x: the layer's input; g: the gradient of its output. recipe: used instead of the layer's own
    (not a delayed one). The layer is run once more on copies: its parameters, gradients, scales and
    counts do not change. There is no grad_input if x requires no grad, no grad_weight for a frozen
    weight, and no product for a kind of layer without an FP32 product in torch. Waits for the
    device.
    """
    with _region.Region(recipe) if recipe is not None else contextlib.nullcontext():
        state = state_here(layer)
        if state is None:
            return {}
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        tensors = {
            role: cast_sums(as_operand(layer, role, t), role, *state, sqnr=True)
            for role, t in zip(ROLES, (x, weight, g), strict=True)
        }
        halves = {role: sums[FIELDS.index("signal") :] for role, sums in tensors.items()}
        copies = {name: _leaf(p) for name, p in layer.named_parameters(recurse=False)}
        buffers = {name: b.clone() for name, b in layer.named_buffers(recurse=False)}
        there = _leaf(x)
        y = functional_call(layer, {**copies, **buffers}, (there,))
        got = y, *torch.autograd.grad(y, (there, copies["weight"]), g.to(y.dtype))
    wide = {name: _leaf(p.float()) for name, p in copies.items()}
    there = _leaf(x.float())
    ref = product_fp32(layer, there, wide["weight"], wide.get("bias"))
    if ref is not None:
        want = ref, *torch.autograd.grad(ref, (there, wide["weight"]), g.float())
        used = True, x.requires_grad, weight.requires_grad
        for name, a, b, wanted in zip(PRODUCTS, want, got, used, strict=True):
            if wanted:
                halves[name] = torch.stack(squares(a.detach(), b.detach()))
    numbers = torch.stack(list(halves.values())).tolist()
    return {name: decibels(*pair) for name, pair in zip(halves, numbers, strict=True)}


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def model_sqnr(model: nn.Module, run: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """`product_sqnr` of every layer of `model` for its x and g in run(), which does one forward and
    backward pass. For a layer that is called more than once, the last call counts.

    Returns {layer: {"recipe", the SQNRs, "remedy"}}. remedy: for a layer below BARS, the first of
    REMEDIES that reaches them, measured on the same x, w and g, or else the last one, as
    {"recipe", the SQNRs}; None for other layers. Buffers, attributes of modules and torch's random
    state are restored; gradients are not cleared.
    """
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def after_forward(layer: nn.Module, args: Any, kwargs: Any, y: torch.Tensor) -> None:
            state = state_here(layer)
            if state is None or state[0] != layer.recipe or not y.requires_grad:
                return  # a region with another recipe, or no graph for backward
            if torch._C._are_functorch_transforms_active():
                return  # their tensors have no values outside
            x = next(iter((*args, *kwargs.values())))
            kept = x.detach().clone().requires_grad_(x.requires_grad)  # may be written to later

            def after_backward(g: torch.Tensor) -> None:
                seen[name] = kept, g.detach().clone()

            y.register_hook(after_backward)

        return after_forward

    layers = dict(measured_layers(model))
    say_what_is_left_out("compare", model)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        handles = [
            layer.register_forward_hook(watch(name), with_kwargs=True)
            for name, layer in layers.items()
        ]
        with unchanged(model), torch.random.fork_rng(devices=devices):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: _judged(layers[name], *seen.pop(name)) for name in layers if name in seen}


def _judged(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, Any]:
    own: Recipe = layer.recipe  # type: ignore[assignment]
    found: dict[str, Any] = {"recipe": own.name, **product_sqnr(layer, x, g), "remedy": None}
    if below_bar(found):
        others = [Recipe.parse(name) for name in REMEDIES]
        for other in others if own.is_scaled else others[1:]:
            if other != own:
                found["remedy"] = {"recipe": other.name, **product_sqnr(layer, x, g, other)}
                if not below_bar(found["remedy"]):
                    break
    return found
