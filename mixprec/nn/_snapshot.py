"""A model's modules as they are, so that a function that fails half-way leaves nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import scaling
from . import _loss_scaling
from ._layer import Layer

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give the modules of `model` their classes, children and attributes back after an exception.

    The values of tensors are not copied."""
    before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    for module in model.modules():
        state = dict(vars(module))
        state |= {name: state[name].copy() for name in _REGISTRIES}
        before.append((module, type(module), state))
    try:
        yield
    except BaseException:
        for module, kind, state in before:
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()
            vars(module).update(state)
            if isinstance(module, Layer):
                (scaling.follow if module.recipe.is_delayed else scaling.forget)(module)
                _loss_scaling.follow(module, module.recipe)
        raise
