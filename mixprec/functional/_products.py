"""The three products of a linear layer with the operands of a recipe."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops.gemm import accumulate
from ..ops.gemm import run as gemm
from ..recipes import Recipe
from ._observed import observe
from .operands import Delayed, Operand

__all__ = ["Product", "forward", "grad_bias", "grad_input", "grad_weight", "t"]


class Product(NamedTuple):
    """A linear layer, beside its weight and bias: see the arguments of `linear`."""

    main_grad: torch.Tensor | None = None
    delayed: Delayed | None = None
    quantized_weight: Operand | None = None
    name: str = ""


def t(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.t()


def forward(
    recipe: Recipe,
    name: str,
    qx: Operand,
    qw: Operand,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    simulated: str | None,
) -> torch.Tensor:
    observe("forward", recipe, name)
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    fast = "forward" in recipe.fast_accum
    return gemm(qx.data, qw.data.t(), qx.scale_inv, t(qw.scale_inv), bias, dtype, fast, simulated)


def grad_input(
    recipe: Recipe,
    name: str,
    qg: Operand,
    w_t: torch.Tensor,
    w_inv_t: torch.Tensor | None,
    dtype: torch.dtype,
    simulated: str | None,
) -> torch.Tensor:
    observe("grad_input", recipe, name)
    fast = "grad_input" in recipe.fast_accum
    return gemm(qg.data, w_t.t(), qg.scale_inv, t(w_inv_t), None, dtype, fast, simulated)


def grad_weight(
    recipe: Recipe,
    name: str,
    qg: Operand,
    x_t: torch.Tensor,
    x_inv_t: torch.Tensor | None,
    dtype: torch.dtype,
    main_grad: torch.Tensor | None,
    simulated: str | None,
) -> torch.Tensor | None:
    observe("grad_weight", recipe, name)
    a, inv = qg.data_t, qg.scale_inv_t
    assert a is not None, "use_t"
    if main_grad is not None:
        accumulate(main_grad, a, x_t.t(), inv, t(x_inv_t), simulated)
        return None
    fast = "grad_weight" in recipe.fast_accum
    return gemm(a, x_t.t(), inv, t(x_inv_t), None, dtype, fast, simulated)


def grad_bias(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = g.unsqueeze(0) if g.dim() == 1 else g.flatten(0, -2)
    return rows.sum(0, dtype=torch.float32).to(dtype)
