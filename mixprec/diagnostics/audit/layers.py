"""The SQNR of each layer with a recipe, of an audit: for compare(sqnr=True)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...recipes import OUTLIERS
from ..stats.layers import measured_layers, say_what_is_left_out
from ..stats.suggest import PRODUCTS, REMEDIES, Sqnr, below_bar
from ..unchanged import unchanged
from . import casts
from .lost import Lost
from .report import Audit


def model_sqnr(model: nn.Module, run: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """What every layer of `model` with a recipe loses in run(), which does one forward and backward
    pass: {layer: {"recipe", x, w, g, y, grad_input, grad_weight, "remedy"}}, SQNRs in dB.

    x, w, g: of the casts; the others of the products, against the same products in FP32 of the
    operands before they were cast, as `Lost.own` of an audit. Those that did not run are missing.
    remedy: for a layer below BARS, the first of REMEDIES that reaches them, measured on the same x,
    w and g, or else the last one, as {"recipe", the SQNRs}; None for other layers. Buffers,
    attributes of modules and torch's random state are restored; gradients are not cleared.
    """
    say_what_is_left_out("compare", model)
    layers = dict(measured_layers(model))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    audit = Audit(model, sqnr=True, what_if=REMEDIES)
    with unchanged(model), torch.random.fork_rng(devices=devices), audit:
        run()
    lost: dict[str, dict[str, Lost]] = {}
    for op in audit.ops:
        source, _, recipe = op.decided.partition(" ")
        if op.module in layers and source in (casts.RECIPE, casts.OVERRIDE):
            for product in op.lost.keys() & {*PRODUCTS}:
                mine = lost.setdefault(op.module, {}).setdefault(product, Lost())
                one = op.lost[product]
                if recipe == OUTLIERS.name:  # g was cast for the other features, too
                    kept = {role: o for role, o in one.operands.items() if role != "g"}
                    one = replace(one, operands=kept)
                elif product == "y" and layers[op.module].recipe.outliers:  # type: ignore[union-attr]
                    one = replace(one, own_signal=0.0)  # that of the sum is with the outliers
                mine.add(one)
    return {name: _judged(layers[name].recipe, lost[name]) for name in layers if name in lost}


def _judged(own: Any, lost: dict[str, Lost]) -> dict[str, Any]:
    found: dict[str, Any] = {"recipe": own.name, **_casts(lost)}
    found |= {name: lost[name].own for name in PRODUCTS if name in lost}
    found["remedy"] = None
    if below_bar(found):
        for other in REMEDIES if own.is_scaled else REMEDIES[1:]:
            if other != own.name:
                sqnrs = {name: lost[name].sqnr_if(other) for name in PRODUCTS if name in lost}
                found["remedy"] = {"recipe": other, **sqnrs}
                if not below_bar(sqnrs):
                    break
    return found


def _casts(lost: dict[str, Lost]) -> Sqnr:
    """Of the casts of x, w and g, each of the first product that has it."""
    found: Sqnr = {}
    for name in PRODUCTS:
        for role, operand in lost[name].operands.items() if name in lost else ():
            found.setdefault(role, operand.sqnr)
    return {role: found[role] for role in "xwg" if role in found}
