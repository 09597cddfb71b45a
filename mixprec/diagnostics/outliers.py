"""choose_outliers: the input features of each layer that its products read in bf16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._local_gradients import is_sharded
from ..nn._layer import Layer
from ..nn.autocast import autocast
from ..ops._dispatch import autocast as torch_autocast
from ..ops._dispatch import checks
from .audit.noise import cast
from .batches import call
from .stats.layers import as_operand
from .unchanged import as_before

_BATCHES = 8


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

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: Layer, args: Any, kwargs: Any, y: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            with torch_autocast.disabled(x.device.type):
                found = _errors(layer, x)
            errors[name] = errors[name] + found if name in errors else found

        return hook

    with ExitStack() as stack:
        stack.enter_context(as_before(model))
        for name, layer in layers.items():
            handle = layer.register_forward_hook(watch(name), with_kwargs=True)
            stack.callback(handle.remove)
        empty = True
        for batch in itertools.islice(batches() if callable(batches) else batches, _BATCHES):
            empty = False
            with autocast("bf16"):
                call(model, batch)
        if empty:
            raise ValueError("choose_outliers: batches must have at least one")
    for name, found in errors.items():
        if not found.isfinite().all():
            raise ValueError(f"choose_outliers: the errors of layer {name!r} must be finite")
    chosen = {}
    for name, found in errors.items():
        layer = layers[name]
        indices = found.topk(layer._outlier_count).indices
        layer._choose(indices)
        chosen[name] = sorted(indices.tolist())
    return chosen


def _errors(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Of each input feature, FP64 [K]."""
    recipe = replace(layer.recipe.product("forward"), stochastic_rounding=())
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    weight = as_operand(layer, "w", layer.weight.detach()).float()
    size_x, size_w = _squares(rows), _squares(weight)
    error_x = _squares(rows - cast(recipe, "x", rows, False))
    error_w = _squares(weight - cast(recipe, "w", weight, False))
    return error_x * size_w + size_x * error_w


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().square().sum(0)
