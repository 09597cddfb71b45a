"""linear_forward, linear_backward: a pass of a linear layer, its casts and products, in one call.

They compute what `quantize`, `quantize_mx` and `gemm` compute one after the other, bit for bit, and
are called where nothing has to see these.
"""

from __future__ import annotations

import torch

from ._dispatch import library


def _stored(name: str) -> str:
    return f"Tensor? {name}_scale_inv, Tensor? {name}_tensor_scale_inv"


library.LIBRARY.define(
    f"linear_forward(Tensor x, {_stored('x')}, Tensor weight, {_stored('w')}, Tensor? bias, "
    "Tensor? scale, Tensor(a!)? amax, int recipe, int choice, bool k_major, bool use_x_t, "
    "bool use_w_t, ScalarType out_dtype)"
    f" -> (Tensor, {', '.join(['Tensor?'] * 12)})"
)
library.LIBRARY.define(
    f"linear_backward(Tensor g, Tensor? x, {_stored('x')}, Tensor? w, {_stored('w')}, "
    "Tensor(a!)? main_grad, Tensor? scale, Tensor(b!)? amax, Tensor? seed, int recipe, int choice, "
    "bool k_major, ScalarType x_dtype, ScalarType w_dtype, ScalarType? bias_dtype, bool by_columns)"
    " -> (Tensor?, Tensor?, Tensor?)"
)
linear_forward = torch.ops.mixprec.linear_forward.default
linear_backward = torch.ops.mixprec.linear_backward.default
IS_BUILT = library.LOAD_ERROR is None
