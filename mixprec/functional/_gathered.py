"""A weight that FSDP2 has gathered as FP8 codes: what the products read, and no other values."""

from __future__ import annotations

from typing import Any

import torch

from ..recipes import Recipe
from .operands import Matrix, Operand, wants_k_major

_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)


_Tensor: Any = torch.Tensor  # whose methods have other types than those of a subclass


class GatheredWeight(_Tensor):
    """The parameter of a layer while it runs: weight [N, K], of which there are codes and scales.

    It has the shape, dtype and gradient of the weight.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    matrix: Matrix
    recipe: Recipe

    @staticmethod
    def make(matrix: Matrix, recipe: Recipe, dtype: torch.dtype) -> Any:
        codes = matrix.data
        weight = _Tensor._make_wrapper_subclass(
            GatheredWeight, codes.shape, dtype=dtype, device=codes.device
        )
        weight.matrix, weight.recipe = matrix, recipe
        return weight

    def operand(self, recipe: Recipe, name: str) -> Operand:
        """What `operands.cast` of the weight returns. RuntimeError for a recipe with another."""
        if recipe is not self.recipe and recipe.casts("w") != self.recipe.casts("w"):
            raise RuntimeError(
                f"{name or 'a layer'}: its weight was gathered in 8 bits for recipe "
                f"{self.recipe.name}, and here the recipe is {recipe.name}: run it without "
                "gather_in_fp8"
            )
        matrix = self.matrix
        if torch.is_grad_enabled() and wants_k_major(matrix.data.device, recipe.w_granularity):
            t = matrix.t()
            return Operand(matrix, t._replace(data=t.data.contiguous()))
        return Operand(matrix)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(first.shape)):
            return cls.make(first.matrix, first.recipe, first.dtype)
        if func is _aten.zeros_like.default:  # FSDP2, for a weight without a gradient
            return torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        raise RuntimeError(
            f"{func}: a weight that gather_in_fp8 has gathered is there as FP8 codes for the "
            "products of its layer alone: read it outside of the forward pass, or leave out "
            "gather_in_fp8"
        )

    def __repr__(self, **_: Any) -> str:
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, codes={self.matrix.data.dtype})"
