"""reuse_weights: the micro-batches of one step share their cast weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .._local_gradients import is_sharded
from . import Layer


@contextlib.contextmanager
def reuse_weights(model: torch.nn.Module) -> Iterator[None]:
    """Cast each weight of `model`'s low-precision layers once, for all passes inside the block.

        for micro_batches in data:
            with mixprec.reuse_weights(model):
                for batch in micro_batches:
                    loss(model(batch)).backward()
            optimizer.step()

    The copies (one byte an element in FP8, two with scales of their own for the transpose) are
    made when the block begins and freed when it ends, however it ends. Weights must not change
    inside: a forward pass that finds a changed one raises RuntimeError (compiled ones do not
    look, and nobody sees writes through `.data`). Begun without grad mode the block does nothing.
    A weight that is sharded over ranks (DTensor) is cast at each use, as without the block. Blocks
    nest: the outermost counts. TypeError if `model` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        got = type(model).__name__
        raise TypeError(f"reuse_weights: model must be a torch.nn.Module, got {got}")
    mine: list[Layer] = []
    try:
        for layer in model.modules() if torch.is_grad_enabled() else ():
            if not isinstance(layer, Layer) or layer._quantized_weight is not None:
                continue
            if not is_sharded(layer.weight) and not layer.weight.is_inference():
                mine.append(layer)
                layer.quantize_weight()
        yield
    finally:
        for layer in mine:
            layer._quantized_weight = None
