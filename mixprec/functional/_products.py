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


class Gemms(NamedTuple):
    """Those of a layer. name: for `observed`; simulated: the GPU of a `simulate` block."""

    recipe: Recipe
    name: str
    simulated: str | None

    def forward(
        self, x: Matrix, w: Matrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [M, K] @ w^T + bias."""
        if bias is not None and bias.dtype == torch.float64:
            bias = bias.float()
        return self._run("forward", x, w, bias, dtype)

    def grad_input(self, g: Matrix, w_t: Matrix, dtype: torch.dtype) -> torch.Tensor:
        """g [M, N] @ w, from w_t [K, N]."""
        return self._run("grad_input", g, w_t, None, dtype)

    def add_grad_input(self, total: torch.Tensor, g: Matrix, w_t: Matrix) -> None:
        """total [M, K] += g @ w."""
        accumulate(total, self._operands("grad_input", g, w_t), self.simulated)

    def grad_weight(
        self, g_t: Matrix, x_t: Matrix, dtype: torch.dtype, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """g^T @ x, from g_t [N, M] and x_t [K, M]; or None where it is added to main_grad."""
        if main_grad is None:
            return self._run("grad_weight", g_t, x_t, None, dtype)
        accumulate(main_grad, self._operands("grad_weight", g_t, x_t), self.simulated)
        return None

    def _run(
        self, kind: str, a: Matrix, b: Matrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        fast = kind in self.recipe.fast_accum
        return gemm(self._operands(kind, a, b), bias, dtype, fast, self.simulated)

    def _operands(self, kind: str, a: Matrix, b: Matrix) -> Operands:
        """Those of a @ b^T, which is about to run."""
        recipe = self.recipe
        observe(kind, recipe, self.name)
        if not recipe.is_block:
            return Operands(a.data, b.data.t(), a.scale_inv, _t(b.scale_inv))
        formats = [recipe.block_format(role) or "" for role in _ROLES[kind]]
        check_not_simulated(self.simulated)
        # Rows of an odd length end with half a byte of zeros, in both operands or in one.
        columns = min(unpacked(m.data, fmt) for m, fmt in zip((a, b), formats, strict=True))
        (a_data, a_inv), (b_data, b_inv) = (
            decode(m.data, m.scale_inv, m.tensor_scale_inv, fmt, columns)
            for m, fmt in zip((a, b), formats, strict=True)
        )
        return Operands(a_data, b_data.t(), a_inv, b_inv)


def grad_bias(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = g.unsqueeze(0) if g.dim() == 1 else g.flatten(0, -2)
    return rows.sum(0, dtype=torch.float32).to(dtype)
