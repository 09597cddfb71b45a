"""Recipe: which number format each operand of a linear layer's three GEMMs is cast to."""

from __future__ import annotations

from dataclasses import dataclass

from . import formats
from .formats import BF16, E4M3, E5M2, FP16, Format


@dataclass(frozen=True)
class Recipe:
    """The formats of activation x, weight w and incoming gradient g, hence of every GEMM.

        forward      y           = x @ w^T      operands x, w
        grad_input   grad of x   = g @ w        operands g, w
        grad_weight  grad of w   = g^T @ x      operands g, x

    x, w, g: a Format, its name or its torch dtype; all FP8 (in any mix), all fp16 or all bf16.
    FP8 operands are cast with current scaling, one scale per tensor, rounded down to a power of
    two unless power_of_two_scale is False; 16-bit operands are cast as IEEE 754 says, unscaled.
    Accumulation is FP32 in every recipe. ValueError if the formats cannot be multiplied.

    Sources: Mixed Precision Training (Micikevicius et al., 2018) for "fp16"; FP8 Formats for Deep
    Learning (Micikevicius et al., 2022) for E4M3 values with E5M2 gradients, "fp8".
    """

    name: str
    x: Format
    w: Format
    g: Format
    power_of_two_scale: bool = True

    def __post_init__(self) -> None:
        for role in ("x", "w", "g"):
            parsed = formats.parse(getattr(self, role), who=f"Recipe: {role}")
            object.__setattr__(self, role, parsed)  # the way to normalise a field when frozen
        all_fp8 = all(f.bits == 8 for f in (self.x, self.w, self.g))
        if not all_fp8 and not self.x == self.w == self.g:
            raise ValueError(
                f"Recipe: x, w and g must be all FP8, all fp16 or all bf16, "
                f"got x {self.x}, w {self.w}, g {self.g}"
            )

    @property
    def forward(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of y = x @ w^T."""
        return self.x, self.w

    @property
    def grad_input(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of g @ w."""
        return self.g, self.w

    @property
    def grad_weight(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of g^T @ x."""
        return self.g, self.x

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients underflow unless the loss is scaled: with fp16, whose exponent
        range is short and which, unlike FP8 here, is cast without a scale of its own."""
        return self.g == FP16

    def __str__(self) -> str:
        if self.x == self.w == self.g and self.name == self.x.name:
            return self.name
        return f"{self.name}: x {self.x}, w {self.w}, g {self.g}"

    @staticmethod
    def parse(recipe: Recipe | str) -> Recipe:
        """Return `recipe` itself, or the one of that name; ValueError listing the names if none."""
        if isinstance(recipe, Recipe):
            return recipe
        found = RECIPES.get(recipe.lower()) if isinstance(recipe, str) else None
        if found is None:
            names = ", ".join(f'"{name}"' for name in RECIPES)
            raise ValueError(f"recipe must be {names} or a mixprec.Recipe, got {recipe!r}")
        return found


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", BF16, BF16, BF16),
        Recipe("fp16", FP16, FP16, FP16),
        Recipe("fp8", E4M3, E4M3, E5M2),
    )
}
