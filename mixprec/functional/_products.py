"""The three products of a linear layer with the operands of a recipe."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops._reference.gemm_scales import Operands
from ..ops.block_operands import check_not_simulated, decode, unpacked
from ..ops.gemm import accumulate
from ..ops.gemm import run as gemm
from ..recipes import Recipe
from ._observed import observe
from .operands import Delayed, Matrix, Operand


class Product(NamedTuple):
    """A linear layer, beside its weight and bias: see the arguments of `linear`."""

    main_grad: torch.Tensor | None = None
    delayed: Delayed | None = None
    quantized_weight: Operand | None = None
    name: str = ""


_ROLES = {"forward": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}


def _t(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.t()


def _operands(kind: str, recipe: Recipe, a: Matrix, b: Matrix, simulated: str | None) -> Operands:
    """Those of a @ b^T."""
    if not recipe.is_block:
        return Operands(a.data, b.data.t(), a.scale_inv, _t(b.scale_inv))
    formats = [recipe.block_format(role) or "" for role in _ROLES[kind]]
    check_not_simulated(simulated)
    # Rows of an odd length end with half a byte of zeros, in both operands or in one.
    columns = min(unpacked(m.data, fmt) for m, fmt in zip((a, b), formats, strict=True))
    (a_data, a_inv), (b_data, b_inv) = (
        decode(m.data, m.scale_inv, m.tensor_scale_inv, fmt, columns)
        for m, fmt in zip((a, b), formats, strict=True)
    )
    return Operands(a_data, b_data.t(), a_inv, b_inv)


def forward(
    recipe: Recipe,
    name: str,
    x: Matrix,
    w: Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    simulated: str | None,
) -> torch.Tensor:
    """x [M, K] @ w^T + bias."""
    observe("forward", recipe, name)
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    fast = "forward" in recipe.fast_accum
    return gemm(_operands("forward", recipe, x, w, simulated), bias, dtype, fast, simulated)


def grad_input(
    recipe: Recipe,
    name: str,
    g: Matrix,
    w_t: Matrix,
    dtype: torch.dtype,
    simulated: str | None,
) -> torch.Tensor:
    """g [M, N] @ w, from w_t [K, N]."""
    return _grad("grad_input", recipe, name, g, w_t, dtype, simulated)


def add_grad_input(
    total: torch.Tensor, recipe: Recipe, name: str, g: Matrix, w_t: Matrix, simulated: str | None
) -> None:
    """total [M, K] += g @ w."""
    observe("grad_input", recipe, name)
    accumulate(total, _operands("grad_input", recipe, g, w_t, simulated), simulated)


def grad_weight(
    recipe: Recipe,
    name: str,
    g_t: Matrix,
    x_t: Matrix,
    dtype: torch.dtype,
    main_grad: torch.Tensor | None,
    simulated: str | None,
) -> torch.Tensor | None:
    """g^T @ x, from g_t [N, M] and x_t [K, M]; or None where it is added to main_grad."""
    if main_grad is None:
        return _grad("grad_weight", recipe, name, g_t, x_t, dtype, simulated)
    observe("grad_weight", recipe, name)
    accumulate(main_grad, _operands("grad_weight", recipe, g_t, x_t, simulated), simulated)
    return None


def _grad(
    kind: str,
    recipe: Recipe,
    name: str,
    a: Matrix,
    b: Matrix,
    dtype: torch.dtype,
    simulated: str | None,
) -> torch.Tensor:
    observe(kind, recipe, name)
    operands = _operands(kind, recipe, a, b, simulated)
    return gemm(operands, None, dtype, kind in recipe.fast_accum, simulated)


def grad_bias(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = g.unsqueeze(0) if g.dim() == 1 else g.flatten(0, -2)
    return rows.sum(0, dtype=torch.float32).to(dtype)
