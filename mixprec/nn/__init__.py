"""Modules that compute in low precision: those of torch.nn with a recipe."""

from ._layer import Layer, QuantizedWeight
from .attention import MultiheadAttention
from .blocks import MLP, GatedMLP, NormLinear
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
    "register_fusion",
]
