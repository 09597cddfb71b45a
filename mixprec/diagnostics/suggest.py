"""Which layers need more bits: what each loses, the recipes to use instead, and outliers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._local_gradients import is_sharded
from ..nn._layer import Layer
from ..nn.autocast import autocast
from ..ops._dispatch import autocast as torch_autocast
from ..ops._dispatch import checks
from ..recipes import OUTLIERS, ROLES
from .audit import Audit, provenance
from .audit.records import BARS, ROLES_OF, Lost
from .layers import after_forward, as_operand, measured_layers, say_what_is_left_out
from .measure import cast
from .passes import call, restored, state_restored
from .writers import aligned, decibels, layer_name

REMEDIES = ("fp8-rowwise", "bf16")  # in this order
Measured = Mapping[str, Mapping[str, Any]]  # by layer, as `model_sqnr` returns it
_BATCHES = 8  # that choose outliers
_NAME = 26


def below_bar(sqnr: Mapping[str, Any]) -> dict[str, float]:
    """The products below their threshold, or with Inf or NaN where FP32 has none."""
    values = {name: sqnr.get(name) for name in BARS}
    return {n: value for n, value in values.items() if value is not None and not value >= BARS[n]}


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
    with state_restored(model), torch.random.fork_rng(devices=devices), audit:
        run()
    lost: dict[str, dict[str, Lost]] = {}
    for op in audit.ops:
        source, _, recipe = op.decided.partition(" ")
        if op.module in layers and source in (provenance.RECIPE, provenance.OVERRIDE):
            for product in op.lost.keys() & {*ROLES_OF}:
                total = lost.setdefault(op.module, {}).setdefault(product, Lost())
                part = op.lost[product]
                if recipe == OUTLIERS.name:  # g was cast for the other features, too
                    kept = {role: o for role, o in part.operands.items() if role != "g"}
                    part = replace(part, operands=kept)
                elif product == "y" and layers[op.module].recipe.outliers:  # type: ignore[union-attr]
                    part = replace(part, own_signal=0.0)  # that of the sum is with the outliers
                total.add(part)
    return {name: _judged(layers[name].recipe, lost[name]) for name in layers if name in lost}


def _judged(recipe: Any, lost: dict[str, Lost]) -> dict[str, Any]:
    products = [name for name in ROLES_OF if name in lost]
    # Of each cast, in the first product that has it.
    casts = {r: o.sqnr for name in reversed(products) for r, o in lost[name].operands.items()}
    row: dict[str, Any] = {"recipe": recipe.name, **{r: casts[r] for r in ROLES if r in casts}}
    row |= {name: lost[name].own for name in products}
    row["remedy"] = None
    if below_bar(row):
        for remedy in REMEDIES if recipe.is_scaled else REMEDIES[1:]:
            if remedy != recipe.name:
                sqnrs = {name: lost[name].sqnr_if(remedy) for name in products}
                row["remedy"] = {"recipe": remedy, **sqnrs}
                if not below_bar(sqnrs):
                    break
    return row


class Overrides(dict[str, str]):
    """{layer: recipe}, as mixprec.convert takes it; `reasons` explains each, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    @staticmethod
    def of(measured: Measured) -> Overrides:
        result = Overrides()
        for layer, row in measured.items():
            if (remedy := row["remedy"]) is not None:
                result[layer] = remedy["recipe"]
                result.reasons[layer] = "; ".join(
                    f"{name} has {decibels(value)} dB in {row['recipe']}, below {BARS[name]:g}, "
                    f"and {decibels(remedy.get(name))} in {remedy['recipe']}"
                    for name, value in below_bar(row).items()
                )
        return result

    def __str__(self) -> str:
        lines = [f"{layer_name(n)}: {self[n]}: {why}" for n, why in self.reasons.items()]
        return "\n".join(lines) or "no layer is below its bar"


def _margin(row: Mapping[str, Any]) -> float:
    """How far the worst product is above its threshold; -Inf if one is not finite."""
    margins = [row[n] - bar for n, bar in BARS.items() if row.get(n) is not None]
    return min((-math.inf if math.isnan(m) else m for m in margins), default=math.inf)


def sqnr_table(measured: Mapping[str, Measured], limit: int | None) -> str:
    """The layers of each recipe, worst first, as text."""
    header: tuple[str, ...] = ("recipe", "layer", *ROLES, "y", "grad_in", "grad_w", "instead")
    cells: list[tuple[str, ...]] = [header]
    left_out = 0
    for recipe, layers in measured.items():
        order = sorted(layers, key=lambda name: _margin(layers[name]))
        left_out += len(order) - len(order[:limit])
        cells += [(recipe, *_cells(name, layers[name])) for name in order[:limit]]
    lines = aligned(cells, left=(0, 1, len(header) - 1))
    if left_out:
        lines.append(f"... and {left_out} more, all with a larger margin")
    bars = " and ".join(f"{bar:g} for {name}" for name, bar in BARS.items())
    title = f"SQNR in dB against FP32, worst layers first; * is below the bar: {bars}"
    return "\n".join([title, *lines])


def _cells(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    low = below_bar(row)
    yield layer_name(name, _NAME)
    for column in (*ROLES, *ROLES_OF):
        yield decibels(row.get(column)) + ("*" if column in low else "")
    yield row["remedy"]["recipe"] if row["remedy"] else ""


@torch.no_grad()
def choose_outliers(
    model: nn.Module, batches: Iterable[Any] | Callable[[], Iterable[Any]]
) -> dict[str, list[int]]:
    """Choose the outliers of each layer whose recipe has some, and return their indices by layer.

    They are the input features k that cause the largest error of y [M, N] = x [M, K] @ w [N, K]^T,
    in the sum over the first 8 of batches:

        |x_k - q(x)_k|^2 |w_k|^2 + |x_k|^2 |w_k - q(w)_k|^2

    with the norms of columns and q the cast for forward, to nearest. batches: as `mixprec.compare`
    takes them. Only forward passes are run, in which the layers compute in bf16; buffers and the
    random state are as before. The layers' buffer `outliers`, which state dicts have, has a 1 for
    each until the next call; a layer that does not run in these batches keeps what it has.

    Call it after `mixprec.convert`, and on every rank with the same batches. ValueError if no
    layer has a recipe with outliers, if there is no batch, for weights that are sharded, and for
    errors that are Inf or NaN; then nothing is changed. TypeError if `model` is not a module.
    """
    checks.is_module("choose_outliers", model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Layer) and module.recipe.outliers
    }
    if not layers:
        raise ValueError(
            "choose_outliers: the model must have layers whose recipe has outliers, such as those "
            'of mixprec.convert(model, "mxfp4+outliers-0.01"), got none'
        )
    for name, layer in layers.items():
        if is_sharded(layer.weight):
            raise ValueError(f"choose_outliers: the weight of {name!r} is sharded: choose before")
    errors: dict[str, torch.Tensor] = {}

    def add(name: str, layer: nn.Module, x: torch.Tensor, _: Any) -> None:
        with torch_autocast.disabled(x.device.type):
            added = _errors(layers[name], x)
        errors[name] = errors[name] + added if name in errors else added

    with restored(model), after_forward(layers, add):
        batch = None
        for batch in itertools.islice(batches() if callable(batches) else batches, _BATCHES):
            with autocast("bf16"):
                call(model, batch)
        if batch is None:
            raise ValueError("choose_outliers: batches must have at least one")
    for name, error in errors.items():
        if not error.isfinite().all():
            raise ValueError(f"choose_outliers: the errors of layer {name!r} must be finite")
    chosen = {}
    for name, error in errors.items():
        indices = error.topk(layers[name]._outlier_count).indices
        layers[name]._choose(indices)
        chosen[name] = sorted(indices.tolist())
    return chosen


def _errors(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Of each input feature, FP64 [K]."""
    recipe = replace(layer.recipe.product("forward"), stochastic_rounding=())
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    weight = as_operand(layer, "w", layer.weight.detach()).float()
    size_x, size_w = _squares(rows), _squares(weight)
    error_x = _squares(rows - cast(recipe, "x", rows))
    error_w = _squares(weight - cast(recipe, "w", weight))
    return error_x * size_w + size_x * error_w


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().square().sum(0)
