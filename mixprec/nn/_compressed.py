"""A model whose every forward pass runs inside compress_saved."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..memory.compress_saved import Bits, compress_saved


class CompressedForward:
    """The `forward` of one module, as an attribute of it.

    Not a pair of hooks, which torch does not call for KeyboardInterrupt, and not a closure, which
    would go on calling the module that a deepcopy was made of.
    """

    def __init__(self, module: nn.Module, bits: Bits) -> None:
        self.module, self.bits = module, bits
        self.replaced = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with compress_saved(self.bits, model=self.module):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """For trainers that look up the arguments of a model."""
        return inspect.signature(self.replaced or type(self.module).forward.__get__(self.module))


def set_saved(model: nn.Module, bits: Bits | None) -> None:
    """Run the model's forward passes inside compress_saved(bits), or no longer, with None."""
    before = vars(model).get("forward")
    if isinstance(before, CompressedForward):
        del model.forward
        if before.replaced is not None:
            model.forward = before.replaced
    if bits is not None:
        model.forward = CompressedForward(model, bits)


def saved_of(model: nn.Module) -> Bits | None:
    """The bits of `set_saved`."""
    forward = vars(model).get("forward")
    return forward.bits if isinstance(forward, CompressedForward) else None
