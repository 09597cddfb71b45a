"""The time and the memory of a layer's products by recipe, on a processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...availability import why_not_cuda
from ...ops._reference.block_formats import BLOCK_FORMATS
from ...recipes import READ_BY, ROLES, Recipe
from .sensitivity import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Layer


@dataclass(frozen=True)
class Hardware:
    """rates: FLOP/s of dense products by the bits of the operands' elements; bandwidth: bytes/s.

    Without a name time is counted in FLOPs of 16-bit products: those of half the bits take half the
    time, and bytes take none.
    """

    name: str
    capability: tuple[int, int] | None
    rates: dict[int, float]
    bandwidth: float

    def why_not(self, recipe: Recipe) -> str | None:
        """Why products of this recipe are not faster there than in bf16; None: they are."""
        if self.capability is None:
            return None
        reason = why_not_cuda(recipe, self.capability, self.name)
        if reason is None and recipe.x.bits not in self.rates:
            return f"no rate is known of products of {recipe.x.bits} bits on {self.name}"
        return reason

    def seconds(self, flops: float, moved: float, recipe: Recipe) -> float:
        """Of a product with these FLOPs and bytes of operands and result."""
        return max(flops / self.rates[recipe.x.bits], moved / self.bandwidth)


_COUNTED = Hardware("", None, {16: 1.0, 8: 2.0, 6: 2.0, 4: 4.0}, float("inf"))
# NVIDIA's data sheets, without sparsity: A100 80GB, H100 and H200 SXM, B200 of HGX, RTX 4090.
TABLE = {
    found.name.lower().replace(" ", ""): found
    for found in (
        Hardware("A100", (8, 0), {16: 312e12}, 2.04e12),
        Hardware("H100", (9, 0), {16: 989e12, 8: 1979e12}, 3.35e12),
        Hardware("H200", (9, 0), {16: 989e12, 8: 1979e12}, 4.8e12),
        Hardware("B200", (10, 0), {16: 2250e12, 8: 4500e12, 4: 9000e12}, 8e12),
        Hardware("RTX 4090", (8, 9), {16: 165e12, 8: 330e12}, 1.01e12),
    )
}


def parse(hardware: str | Hardware | None) -> Hardware:
    """ValueError, with the names, for one that is not known."""
    if hardware is None:
        return _COUNTED
    if isinstance(hardware, Hardware):
        return hardware
    found = TABLE.get(str(hardware).lower().replace(" ", ""))
    if found is None:
        names = ", ".join(map(repr, TABLE))
        raise ValueError(
            f"plan: hardware must be {names}, a Hardware or None (FLOPs and bytes only), got "
            f"{hardware!r}"
        )
    return found


def choose(
    formats: Iterable[Recipe | str], hardware: Hardware
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """The recipes of a plan by name, "bf16" always with them, and why others were left out."""
    chosen, left = {"bf16": Recipe.parse("bf16")}, {}
    for given in formats:
        recipe = Recipe.parse(given)
        if recipe.products or recipe.outliers or recipe.is_delayed or recipe.needs_loss_scaling:
            raise ValueError(
                "plan: formats must be recipes of all three products without state, outliers and "
                f"loss scaling, got {recipe.name}"
            )
        if Recipe.parse(recipe.name) != recipe:
            raise ValueError(f"plan: formats must be named recipes, got another {recipe.name!r}")
        if (reason := hardware.why_not(recipe)) is not None:
            left[recipe.name] = reason
        else:
            chosen[recipe.name] = recipe
    return chosen, left


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
