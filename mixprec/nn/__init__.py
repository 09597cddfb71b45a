"""Modules that compute in low precision: those of torch.nn with a recipe."""

from ._layer import Layer, QuantizedWeight
from .attention import MultiheadAttention
from .conv import Conv2d
from .conv1d import Conv1D
from .intercepted import Experts, Intercepted
from .linear import Linear

__all__ = [
    "Conv1D",
    "Conv2d",
    "Experts",
    "Intercepted",
    "Layer",
    "Linear",
    "MultiheadAttention",
    "QuantizedWeight",
]
