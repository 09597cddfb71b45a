"""The model of a user's program, for commands."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn


def made(place: str) -> tuple[Any, ...]:
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
