"""The errors of products with operands that another recipe would have made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ...functional import operands
from ...functional._products import ROLES
from ...ops._reference.block_formats import hadamard
from ...recipes import Recipe
from ..stats.measure import decoded, squares


def parse(names: Iterable[Recipe | str]) -> dict[str, Recipe]:
    """The recipes of what_if=, by name, with rounding to nearest: no random numbers are drawn."""
    found = {}
    for name in names:
        recipe = Recipe.parse(name)
        if recipe.is_delayed:
            raise ValueError(
                "audit: what_if must be a recipe with scales of the tensors that it casts, got "
                f"{recipe.name}, whose scales are of earlier steps"
            )
        if recipe.outliers:
            raise ValueError(
                f"audit: what_if must be a recipe without outliers, got {recipe.name}, whose "
                "indices are those of a layer"
            )
        products = tuple((n, replace(r, stochastic_rounding=())) for n, r in recipe.products)
        found[recipe.name] = replace(recipe, stochastic_rounding=(), products=products)
    return found


def product(
    recipe: Recipe, roles: tuple[str, str], a: torch.Tensor, b_t: torch.Tensor
) -> tuple[float, float]:
    """The two halves of the SQNR of a [M, K] @ b_t [N, K]^T, both FP32, cast as these roles."""
    recipe = recipe.product(next((n for n, of in ROLES.items() if {*of} == {*roles}), "forward"))
    is_rotated = recipe.hadamard and set(roles) == {"g", "x"}
    used = [cast(recipe, role, t, is_rotated) for role, t in zip(roles, (a, b_t), strict=True)]
    signal, noise = squares(a @ b_t.t(), used[0] @ used[1].t())
    return float(signal), float(noise)


def cast(recipe: Recipe, role: str, rows: torch.Tensor, is_rotated: bool) -> torch.Tensor:
    """The values of rows [R, C], which a product sums along C, cast as this role: FP32."""
    rows = rows.float().contiguous()
    rows = hadamard(rows) if is_rotated else rows
    operand = operands.cast(rows, role, recipe, None, use_t=False, record=False)
    if operand.scale_inv is None:
        return operand.data.float()
    return decoded(operand, rows, recipe.block_format(role))[0]


def of_convolution(
    recipe: Recipe, role: str, t: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """The values of an operand of a convolution, FP32, cast as that of mixprec.nn casts it: as
    points if it combines only channels, else as [first dimension, all the rest]. recipe: that of
    the product."""
    if role != "w" and not transposed and all(size == 1 for size in weight.shape[2:]):
        points = t.movedim(1, -1)
        return cast(recipe, role, points.flatten(0, -2), False).view(points.shape).movedim(-1, 1)
    return cast(recipe, role, t.flatten(1), False).view(t.shape)
