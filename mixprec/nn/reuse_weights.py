"""reuse_weights: the micro-batches of one step share their cast weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from .._local_gradients import is_sharded
from .._steps import after_steps
from ..ops._dispatch import checks
from . import Layer

_kept: set[Layer] = set()  # the layers of the blocks that any thread is in


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The steps of torch with fused=True change params, but not their versions."""
    written = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    for layer in list(_kept):
        weight = layer._quantized_weight
        if weight is not None and id(weight.weight) in written:
            layer._quantized_weight = weight._replace(version=-1)


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
    A weight that is parametrized or sharded over ranks (DTensor) is cast at each use, as without.
    Blocks nest: the outermost one applies. TypeError if `model` is not a module.
    """
    checks.is_module("reuse_weights", model)
    after_steps(_after_step)
    mine: list[Layer] = []
    try:
        for layer in model.modules() if torch.is_grad_enabled() else ():
            if not isinstance(layer, Layer) or layer._quantized_weight is not None:
                continue
            if not layer._one_product or is_parametrized(layer):  # it is not kept
                continue
            if not is_sharded(layer.weight) and not layer.weight.is_inference():
                mine.append(layer)
                layer._quantize_weight()
        _kept.update(mine)
        yield
    finally:
        for layer in mine:
            layer._quantized_weight = None
            _kept.discard(layer)
