"""reuse_weights: the micro-batches of one step share their cast weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._local_gradients import PLAIN, is_fully_sharded, is_sharded, local
from .._steps import after_steps
from ..functional.operands import largest_of_all
from ..ops._dispatch import checks
from ..ops.scale import amax_op
from . import Layer
from .linear import Linear

_kept: set[Layer] = set()  # the layers of the blocks that any thread is in


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The steps of torch with fused=True change params, but not their versions."""
    written = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    for layer in list(_kept):
        weight = layer._quantized_weight
        if weight is not None and id(weight.weight) in written:
            layer._quantized_weight = weight._replace(version=-1)


@torch.no_grad()
def _quantize_parts(layers: list[Linear]) -> None:
    """Of weights that are sharded over ranks: one all-reduce for all that have the same ranks."""
    alike: dict[Any, list[Linear]] = {}
    for layer in layers:
        weight: Any = layer.weight
        places = enumerate(weight.placements)
        dims = [(weight.device_mesh, dim) for dim, place in places if not place.is_replicate()]
        alike.setdefault(tuple(dims), []).append(layer)
    for groups, same in alike.items():
        amaxes = largest_of_all(torch.stack([amax_op(local(m.weight)) for m in same]), groups)
        for layer, amax in zip(same, amaxes, strict=True):
            layer._quantize_weight(amax)


@contextlib.contextmanager
def reuse_weights(model: torch.nn.Module) -> Iterator[None]:
    """Cast each weight of `model`'s low-precision layers once, for all passes inside the block.

        for micro_batches in data:
            with mixprec.reuse_weights(model):
                for batch in micro_batches:
                    loss(model(batch)).backward()
            optimizer.step()

    The copies (one byte per element in FP8, two where the transpose has its own scales) are created
    when the block is entered and freed when it exits, also by an exception. Weights must not change
    inside: a forward pass with a changed weight raises RuntimeError (not in compiled code, and
    writes in place through `.data` are not detected). Without grad mode the block has no effect.
    A weight that is parametrized or sharded by fully_shard is cast at each use, as without. For
    those of parallelize_module ranks agree on the scales of all in one all-reduce, not one each.
    Blocks nest: the outermost one applies. TypeError if `model` is not a module.
    """
    checks.is_module("reuse_weights", model)
    after_steps(_after_step)
    mine: list[Layer] = []
    parts: list[Linear] = []
    gathers = any(map(is_fully_sharded, model.modules()))  # each weight anew, in each pass
    try:
        for layer in model.modules() if torch.is_grad_enabled() else ():
            if not isinstance(layer, Layer) or layer._quantized_weight is not None:
                continue
            if not layer._one_product or is_parametrized(layer):  # it is not kept
                continue
            if layer.weight.is_inference():
                continue
            if type(layer.weight) in PLAIN:
                mine.append(layer)
                layer._quantize_weight()
            elif (
                is_sharded(layer.weight)
                and isinstance(layer, Linear)
                and not (layer.recipe.has_outliers or gathers)
            ):
                mine.append(layer)
                parts.append(layer)
        _quantize_parts(parts)
        _kept.update(mine)
        yield
    finally:
        for layer in mine:
            layer._quantized_weight = None
            _kept.discard(layer)
