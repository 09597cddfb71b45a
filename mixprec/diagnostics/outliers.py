"""Which input features of a layer are to be computed in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._local_gradients import is_sharded
from ..nn._layer import Layer
from ..nn.autocast import autocast
from ..ops._dispatch import autocast as torch_autocast
from ..ops._dispatch import checks
from .layers import Matrices, after_forward
from .measure import cast
from .passes import call, restored

_BATCHES = 8  # that choose outliers


@torch.no_grad()
def choose_outliers(
    model: nn.Module, batches: Iterable[Any] | Callable[[], Iterable[Any]]
) -> dict[str, list[int]]:
    """Choose the outliers of each layer whose recipe has some, and return their indices by layer.

    They are the input features k that cause the largest error of y [M, N] = x [M, K] @ w [N, K]^T,
    in the sum over the first 8 of batches:

        |x_k - q(x)_k|^2 |w_k|^2 + |x_k|^2 |w_k - q(w)_k|^2

    with the norms of columns and q the cast for forward, to nearest. batches: a list, a
    DataLoader, or a function that returns an iterable; a batch is a tuple or list of forward's
    arguments, a dict (or another mapping) of its keyword arguments, or one tensor. Only forward
    passes are run, in which the layers compute in bf16; buffers and the
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

    def add(name: str, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch_autocast.disabled(x.device.type):
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            added = _errors(layers[name], Matrices.of_layer(layer, x, weight, y))
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


def _errors(layer: Layer, m: Matrices) -> torch.Tensor:
    """Of each input feature, FP64 [K]."""
    recipe = replace(layer.recipe.product("forward"), stochastic_rounding=())
    error_x, error_w = (_squares(t - cast(recipe, r, t)) for r, t in (("x", m.x), ("w", m.w)))
    return error_x * _squares(m.w) + _squares(m.x) * error_w


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().square().sum(0)
