"""linear, grouped_linear, matmul, convolution and linear_cross_entropy with forward and backward
passes in the formats of a recipe, and the orthogonalization of matrices; attention and rotary
embeddings."""

from ._attention import attention
from ._blocks import mlp, norm_linear
from ._convolution import IntOrPair, cast_conv_weight, conv2d, convolution, is_pointwise
from ._derivatives import twice_differentiable
from ._grouped_linear import grouped_linear
from ._linear import linear, matmul
from ._linear_cross_entropy import linear_cross_entropy
from ._newton_schulz import orthogonalize
from ._one_pass import rotary, rotary_qkv

__all__ = [
    "IntOrPair",
    "attention",
    "cast_conv_weight",
    "conv2d",
    "convolution",
    "grouped_linear",
    "is_pointwise",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "mlp",
    "norm_linear",
    "orthogonalize",
    "rotary",
    "rotary_qkv",
    "twice_differentiable",
]
