"""Modules that compute in low precision: those of torch.nn with a recipe."""

from ._layer import Layer, QuantizedWeight
from .conv import Conv2d
from .linear import Linear

__all__ = ["Conv2d", "Layer", "Linear", "QuantizedWeight"]
