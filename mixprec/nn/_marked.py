"""The modules around layers, where attention and shared casts are in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..functional.operands import share_casts
from ._fused_forward import FusedForward
from ._layer import Layer
from ._sdpa import AttentionMode

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward pass


def layers_in(module: nn.Module) -> Iterator[Layer]:
    return (m for m in module.modules() if isinstance(m, Layer))


def own_layers(module: nn.Module) -> Iterator[Layer]:
    """The layers that the forward pass of `module` itself calls, also those in its lists."""
    for child in module._modules.values():
        if isinstance(child, Layer):
            yield child
        elif child is not None and type(child) in CONTAINERS:
            yield from own_layers(child)


class Marked(FusedForward):
    """A module around layers: attention in its forward pass is `functional.attention`, and layers
    that are its children cast a tensor that several of them take once."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        layers = [*own_layers(self.module)]
        layer = layers[0] if layers else next(layers_in(self.module), None)
        with ExitStack() as stack:
            if layer is not None and not AttentionMode.serves(layer.recipe):
                stack.enter_context(AttentionMode(layer.recipe))
            if len(layers) > 1 and not torch.compiler.is_compiling():
                stack.enter_context(share_casts())
            return self.unfused(*args, **kwargs)
