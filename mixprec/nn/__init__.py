"""Modules that compute in low precision: those of torch.nn with a recipe."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from ._layer import Layer, QuantizedWeight
from .attention import MultiheadAttention
from .blocks import MLP, GatedMLP, NormLinear, ResidualSequential
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .experts import Experts
from .intercepted import Intercepted
from .known import MLPSpec, NormSpec, register_fusion
from .linear import Conv1D, Linear
from .linear_cross_entropy import LinearCrossEntropy

__all__ = [
    "MLP",
    "Conv1D",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Experts",
    "GatedMLP",
    "Intercepted",
    "Layer",
    "Linear",
    "LinearCrossEntropy",
    "MLPSpec",
    "MultiheadAttention",
    "NormLinear",
    "NormSpec",
    "QuantizedWeight",
    "ResidualSequential",
    "register_fusion",
]

# Where pickles of earlier versions look for what fused and compressed models hold.
_FORMER = {
    "_compressed": {"CompressedForward": "_replaced.Compressed"},
    "_feed_forward": {"FusedFeedForward": "fuse.FusedFeedForward"},
    "_known_functions": {"RotaryForward": "_scope.RotaryForward"},
    "_marked": {"Marked": "_scope.FusionScope"},
    "_one_pass": {"FusedNorm": "_fused.FusedNorm", "FusedActivation": "_fused.FusedActivation"},
}


class _Former(ModuleType):
    def __getattr__(self, name: str) -> Any:
        place = _FORMER[self.__name__.rpartition(".")[2]].get(name)
        if place is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, _, now = place.partition(".")
        return getattr(import_module(f"{__name__}.{module}"), now)


for _name in _FORMER:
    sys.modules[f"{__name__}.{_name}"] = _Former(f"{__name__}.{_name}")
