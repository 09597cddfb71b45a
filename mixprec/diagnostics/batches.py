"""The model of a user's program; a batch as its arguments, and the loss in what it returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def entry_point(place: str) -> tuple[Any, ...]:
    """What FUNCTION of "MODULE:FUNCTION" returns: a model, a batch or batches, and perhaps a loss.
    ValueError for anything else."""
    module, _, name = place.partition(":")
    if not module or not name:
        raise ValueError(f"expected MODULE:FUNCTION, as in train:make_model, got {place!r}")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if getattr(error, "name", "") not in (module, name):
            raise
        raise ValueError(str(error)) from None
    found = make()
    is_pair = isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module)
    if not is_pair:
        got = type(found).__name__
        raise ValueError(f"{place} must return (model, data) or (model, data, loss), got {got}")
    result: tuple[Any, ...] = found
    return result


def call(model: nn.Module, batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch) otherwise."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in mappings, tuples and lists; of DTensors, the local part."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with function(tensor) in place of each tensor in mappings, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if not isinstance(value, (tuple, list)):
        return value
    items = [map_tensors(function, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def scalar_loss(op: str, output: Any, remedy: str) -> torch.Tensor:
    """`output`, or its `loss` (a key or an attribute), as a tensor []; ValueError if it is not one
    number, with what to do."""
    loss = output
    if not isinstance(output, torch.Tensor):
        has_keys = isinstance(output, Mapping)
        loss = output.get("loss") if has_keys else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
    raise ValueError(f"{op}: the loss must be one number, got {got}: {remedy}")
