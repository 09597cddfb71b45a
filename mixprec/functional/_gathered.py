"""A tensor that ranks have gathered as FP8 codes: what the products read, and no other values."""

from __future__ import annotations

from typing import Any

import torch

from ..recipes import Recipe
from .operands import Matrix, Operand, wants_k_major

_aten: Any = torch.ops.aten
_SAME = tuple(getattr(_aten, name).default for name in ("detach", "alias", "as_strided", "view"))


_Tensor: Any = torch.Tensor  # whose methods have other types than those of a subclass


class Gathered(_Tensor):
    """The weight of a layer while it runs, or its input x, of which there are codes and scales.

    It has the shape, dtype and gradient of what it stands for. role: "w" or "x".
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    matrix: Matrix
    recipe: Recipe
    role: str

    @staticmethod
    def make(
        matrix: Matrix, recipe: Recipe, role: str, shape: torch.Size, dtype: torch.dtype
    ) -> Any:
        its = _Tensor._make_wrapper_subclass(
            Gathered, shape, dtype=dtype, device=matrix.data.device
        )
        its.matrix, its.recipe, its.role = matrix, recipe, role
        return its

    def operand(self, recipe: Recipe, name: str, use_t: bool) -> Operand:
        """What `operands.cast` of it returns. RuntimeError for a recipe with another."""
        role = self.role
        if recipe is not self.recipe and recipe.casts(role) != self.recipe.casts(role):
            what = "weight" if role == "w" else "input"
            raise RuntimeError(
                f"{name or 'a layer'}: its {what} was gathered in 8 bits for recipe "
                f"{self.recipe.name}, and here the recipe is {recipe.name}: run it without "
                f"{'gather_in_fp8' if role == 'w' else 'PrepareFP8Input'}"
            )
        matrix = self.matrix
        granularity = getattr(recipe, f"{role}_granularity")
        if use_t and wants_k_major(matrix.data.device, granularity):
            t = matrix.t()
            return Operand(matrix, t._replace(data=t.data.contiguous()))
        return Operand(matrix)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(first.shape)):
            return cls.make(first.matrix, first.recipe, first.role, first.shape, first.dtype)
        if func is _aten.zeros_like.default:  # FSDP2, for a weight without a gradient
            return torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        raise RuntimeError(
            f"{func}: what gather_in_fp8 and PrepareFP8Input have gathered is there as FP8 codes "
            "for the products of FP8 layers alone: read it elsewhere, or gather it in 16 bits"
        )

    def __repr__(self, **_: Any) -> str:
        codes = self.matrix.data.dtype
        return f"Gathered({tuple(self.shape)}, {self.dtype}, {self.role}, codes={codes})"
