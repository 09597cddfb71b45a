"""unconvert: the inverse of convert."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import scaling
from ..ops._dispatch import checks
from . import _loss_scaling, kinds
from ._compressed import saved_of, set_saved
from ._layer import Layer
from ._subclass import inject_parametrizations, original_class
from .fuse import unfuse

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


logger = logging.getLogger("mixprec")


def unconvert(model: nn.Module) -> nn.Module:
    """Make the layers of `model` those of torch again, or of the classes that `convert` found, in
    place; return the model.

    Modules keep their identity, and so their parameters, hooks, handles, names, training mode and
    all other attributes; optimizers go on with the same parameters. Recipes, the scales of delayed
    recipes and counters are dropped, so that the state dict is that of a model which was never
    converted; nothing is fused or runs inside `compress_saved` any more, and torch's encoder layers
    take their fast path again. Layers that were constructed as mixprec.nn's become torch's too. A
    model without such layers stays as it is. After delayed recipes wrap the model in
    DistributedDataParallel anew, which keeps a list of its buffers.

    What other functions changed stays: dtypes (`cast_parameters(model, torch.float32)` casts them
    back) and the weights that `freeze` stored in 8 or 4 bits. `mixprec.autocast(enabled=False)` has
    the effect for a region only.

    TypeError if `model` is not a module. ValueError, before anything is changed, for a layer whose
    forward was replaced, as by a wrapper that calls the one of `convert`, and for one whose class
    was derived from mixprec.nn's, as by a subclass or by fully_shard of the layer itself.
    """
    checks.is_module("unconvert", model)
    originals: dict[Layer, type[nn.Module]] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, Layer):
            continue
        where = fqn or "the model"
        if "forward" in vars(module) and saved_of(module) is None:
            raise ValueError(
                f"unconvert: {where} has its own forward: remove what wraps it, then unconvert"
            )
        original = original_class(module)
        if original is None:
            raise ValueError(
                f"unconvert: {where} is a {type(module).__name__}, a class derived from a layer of "
                "mixprec.nn, and has no class to go back to; if fully_shard made it, unconvert "
                "before fully_shard"
            )
        originals[module] = original
    for module in model.modules():
        set_saved(module, None)
    unfuse(model)
    for module, original in originals.items():
        module._leave()
        module.__class__ = original  # type: ignore[assignment]
        inject_parametrizations(module)
    kinds.restore_fast_paths(model)
    logger.info("unconvert: %d layers", len(originals))
    return model
