"""linear_forward, linear_backward: a pass of a linear layer, its casts and products, in one call.

They compute what `quantize`, `quantize_mx` and `gemm` compute one after the other, bit for bit, and
are called where nothing has to see these. With offs, on a CPU only, they are the passes of
`mixprec.functional.grouped_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._dispatch import autocast, backends, gemm_vendor, library
from ._reference import scale_layout
from .gemm import gemm_accumulate_op, gemm_op
from .quantize import quantize_op

_OPTIONS = "int recipe, int choice, bool k_major"


def _stored(name: str) -> str:
    return f"Tensor? {name}_scale_inv, Tensor? {name}_tensor_scale_inv"


library.LIBRARY.define(
    f"linear_forward(Tensor x, {_stored('x')}, Tensor weight, {_stored('w')}, Tensor? bias, "
    f"Tensor? scale, Tensor(a!)? amax, {_OPTIONS}, bool use_x_t, bool use_w_t, "
    f"ScalarType out_dtype, Tensor? offs=None) -> (Tensor, {', '.join(['Tensor?'] * 12)})"
)
library.LIBRARY.define(
    f"linear_backward(Tensor g, Tensor? x, {_stored('x')}, Tensor? w, {_stored('w')}, "
    f"Tensor(a!)? main_grad, Tensor? scale, Tensor(b!)? amax, Tensor? seed, {_OPTIONS}, "
    "ScalarType x_dtype, ScalarType w_dtype, ScalarType? bias_dtype, bool by_columns, "
    "Tensor? offs=None) -> (Tensor?, Tensor?, Tensor?)"
)
linear_forward = torch.ops.mixprec.linear_forward.default
linear_backward = torch.ops.mixprec.linear_backward.default


class Kernels(NamedTuple):
    """Of a layer. choice: of product i, forward, grad_input and grad_weight, bit 2 i is
    torch's, and 2 i + 1: with the short accumulator of FP8."""

    choice: int = 0
    k_major: bool = False  # FP8 operands are to have K contiguous
    accumulates: bool = True  # grad_weight may be added to main_grad


def run_on_gpu(op: Callable[..., Any], its: Kernels, recipe: Any, *args: Any) -> Any:
    """One of the two ops on a GPU, outside of torch.autocast."""
    with autocast.disabled("cuda"):
        try:
            if its.choice & 0b010101 and not recipe.is_scaled:
                gemm_vendor.sum_in_fp32(recipe.x.dtype)
            return op(*args)
        except RuntimeError as error:
            if "CUDA out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise


_CPU = Kernels() if library.has_cpu_kernel("linear_forward") else None
_HAS_CUDA = library.has_cuda_kernel("linear_forward")
_UNKNOWN = Kernels(-1)
_known: dict[Any, Kernels | None] = {}  # by what the choice of a product depends on
_MOST = 4096  # calls of as many shapes are known


def kernels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Any,
    out_dtype: torch.dtype,
    k_major: bool,
) -> Kernels | None:
    """The kernels of a layer's passes, which `gemm` would choose one by one; None where there are
    others: of Triton, or with a call of their own. recipe: a `mixprec.Recipe`."""
    if x.is_cpu:
        return _CPU
    if not x.is_cuda or not _HAS_CUDA or recipe.is_block:
        return None
    m = x.numel() // max(1, x.shape[-1])
    by_columns = weight.stride(0) == 1 < weight.stride(1) and recipe.power_of_two_scale
    key = (
        *(m, *weight.shape, x.dtype, weight.dtype, None if bias is None else bias.dtype),
        *(out_dtype, recipe.code, recipe.fast_accum, by_columns, k_major, x.device.index),
    )
    its = _known.get(key, _UNKNOWN)
    if its is _UNKNOWN:
        if backends.is_capturing():
            return None
        if len(_known) > _MOST:
            _known.clear()
        _known[key] = its = _chosen(x, weight, bias, recipe, out_dtype, k_major, m, by_columns)
    return its


def _chosen(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Any,
    out_dtype: torch.dtype,
    k_major: bool,
    m: int,
    by_columns: bool,
) -> Kernels | None:
    (n, k), index = weight.shape, x.device.index or 0
    if quantize_op.choose("cuda", index) != quantize_op.handle("cuda"):
        return None

    def stored(role: str, rows: int, columns: int) -> tuple[Any, Any]:
        """A matrix of this role without values, and its scales."""
        data = torch.empty(rows, columns, dtype=getattr(recipe, role).dtype, device="meta")
        if not recipe.is_scaled:
            return data, None
        shape = scale_layout.scale_shape(getattr(recipe, f"{role}_granularity"), rows, columns)
        return data, torch.empty(shape, device="meta")

    def read(role: str, rows: int, columns: int, transposed: bool) -> tuple[Any, Any]:
        grain = getattr(recipe, f"{role}_granularity")
        own = recipe.is_scaled and (k_major or grain in ("row", "block1x128"))
        if not transposed or own:
            return stored(role, rows, columns)
        data, inv = stored(role, columns, rows)
        return data.t(), None if inv is None else inv.t()

    products = [
        ("forward", stored("x", m, k), stored("w", n, k), bias, out_dtype),
        ("grad_input", stored("g", m, n), read("w", k, n, True), None, x.dtype),
        ("grad_weight", read("g", n, m, True), read("x", k, m, True), None, weight.dtype),
    ]
    choice = 0
    for i, (name, a, b, beside, dtype) in enumerate(products):
        a, b = (b, a) if by_columns and name == "grad_weight" else (a, b)
        b_inv, fast = None if b[1] is None else b[1].t(), name in recipe.fast_accum
        run = gemm_op.choose("cuda", index, (a[0], b[0].t(), a[1], b_inv, beside, dtype, fast))
        vendor = gemm_op.is_vendor(run)
        if not vendor and run != gemm_op.handle("cuda"):
            return None
        if vendor and gemm_vendor.granularity(a[1], b_inv, len(a[0]), len(b[0])) == "blocks":
            return None  # whose scales torch's product takes in another form
        choice |= (vendor | fast << 1) << 2 * i
    acc = torch.empty(n, k, device="meta")
    a, b = products[2][1], products[2][2]
    b_inv = None if b[1] is None else b[1].t()
    adds = gemm_accumulate_op.choose("cuda", index, (acc, a[0], b[0].t(), a[1], b_inv))
    return Kernels(choice, k_major, adds == gemm_accumulate_op.handle("cuda"))
