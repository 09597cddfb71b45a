"""The time and the memory of a layer's products, by recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ops._reference.block_formats import BLOCK_FORMATS
from ...recipes import READ_BY, ROLES, Recipe
from .hardware import Hardware
from .sensitivity import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Layer

# What each product reads, and what it writes.
_OPERANDS = {FORWARD: ("x", "w", "y"), GRAD_INPUT: ("y", "w", "x"), GRAD_WEIGHT: ("y", "x", "w")}
_KEPT = {GRAD_WEIGHT: "x", GRAD_INPUT: "w"}  # for backward, by the product that reads it


@dataclass(frozen=True)
class Costs:
    """product: seconds by product and recipe; cast: by role and recipe, of casting that operand
    for one product or for both; kept: bytes for backward by product and recipe."""

    product: dict[str, dict[str, float]]
    cast: dict[str, dict[str, float]]
    kept: dict[str, dict[str, float]]


def costs(layer: Layer, recipes: Mapping[str, Recipe], hardware: Hardware) -> Costs:
    """Of a step, in 16-bit dtypes where nothing is cast. bf16 casts nothing, keeps x itself, and w
    as the parameter that is there anyway."""
    sizes = {"x": layer.x, "w": layer.w, "y": layer.y}
    product: dict[str, dict[str, float]] = {}
    kept: dict[str, dict[str, float]] = {}
    for name in layer.harm:
        *operands, result = (sizes[part] for part in _OPERANDS[name])
        product[name] = {
            key: hardware.seconds(
                layer.flops, sum(operands) * _bytes(recipe, "x") + 2 * result, recipe
            )
            for key, recipe in recipes.items()
        }
        role = _KEPT.get(name)
        kept[name] = {
            key: 0.0
            if role is None or (role == "w" and not recipe.is_scaled)
            else sizes[role] * _bytes(recipe, role)
            for key, recipe in recipes.items()
        }
    elements = {"x": layer.x, "w": layer.w, "g": layer.y}
    cast = {
        role: {
            # Read once, written as it is and transposed.
            key: elements[role] * (2 + 2 * _bytes(recipe, role)) / hardware.bandwidth
            if recipe.is_scaled
            else 0.0
            for key, recipe in recipes.items()
        }
        for role in ROLES
        if any(name in layer.harm for name in READ_BY[role])
    }
    return Costs(product, cast, kept)


def _bytes(recipe: Recipe, role: str) -> float:
    """Of an element with its part of the scales."""
    name = recipe.block_format(role)
    bits: int = getattr(recipe, role).bits
    if name is None:
        return bits / 8
    stored = 4 if bits == 4 else 8  # six bits take a byte
    return stored / 8 + 1 / BLOCK_FORMATS[name].block
