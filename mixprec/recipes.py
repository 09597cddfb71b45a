"""Recipe: how each operand of a layer's three GEMMs is cast and scaled."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from . import _recipe_checks
from ._recipe_checks import (
    AMAX_OF,
    BLOCKS,
    GEMMS,
    GRANULARITIES,
    READ_BY,
    ROLES,
    SCALINGS,
    Checked,
)
from .formats import BF16, E2M1, E4M3, E5M2, FP16, Format

__all__ = [
    "AMAX_OF",
    "BLOCKS",
    "GEMMS",
    "GRANULARITIES",
    "OUTLIERS",
    "PREFIXES",
    "READ_BY",
    "RECIPES",
]
__all__ += ["ROLES", "SCALINGS", "Recipe"]

DELAYED_ROLES = ("x", "g")  # a weight is scaled by its current amax
# Of the recipe of a product in names like "fp8+gw-bf16".
PREFIXES = {"grad_input": "gi-", "grad_weight": "gw-"}
_OUTLIERS = "outliers-"


@dataclass(frozen=True, eq=False)
class Recipe(Checked):
    """The formats and scales of activation x, weight w and incoming gradient g.

        forward      y           = x @ w^T      operands x, w
        grad_input   grad of x   = g @ w        operands g, w
        grad_weight  grad of w   = g^T @ x      operands g, x

    x, w, g: a Format, its name or its torch dtype; all FP8 (in any mix), all fp16 or all bf16, or
    all block formats. 16-bit operands are cast as IEEE 754 says, without a scale. The other
    settings are for FP8:

    x_granularity, w_granularity, g_granularity: which elements share a scale: "tensor", all; "row",
    a row; "block1x128", 128 elements of a row; "block128x128". Rows and blocks run along the
    dimension that the GEMM sums over, so an operand of two GEMMs is quantized once for each, both
    times from the unquantized tensor. The layout of x and g is [M, features], that of w [N, K].
    scaling: "current", from the amax of the tensor itself, or "delayed": one scale per tensor, for
    x and g from the amax of earlier steps (`mixprec.update_scales`), for w from its own. history:
    the number of steps, including the current one (16); amax_of: their "max" or the "most_recent".
    margin: delayed scales are divided by 2^margin. power_of_two_scale: round scales down to a power
    of two, which makes scaling exact. fast_accum: the GEMMs (True: all) whose sums may stay in the
    shorter accumulator of FP8 tensor cores; no effect elsewhere. Otherwise sums are FP32 in every
    recipe.

    Block formats have a granularity of their own for all three operands: "mx", 32 elements of a row
    share a power of two (E4M3, E5M2, E3M2, E2M3 or E2M1); "nvfp4", 16 elements share an E4M3 scale
    and the tensor an FP32 one (E2M1). They are multiplied as `gemm` multiplies them, decoded to
    bf16 exactly; history to fast_accum above are not for them, but these are:

    scale_mode: how an "mx" scale is rounded, "floor", "ceil", "even" or "rceil" (`quantize`).
    stochastic_rounding: the roles whose elements are rounded up or down at random, with the exact
    value as the mean. Each cast draws its seed from torch's default generator of the device.
    hadamard: {"grad_weight": 16, "grad_input": 128}: of which backward products both operands are
    multiplied, in FP32, by an orthogonal matrix of that size (Hadamard's, with fixed signs) along
    what is summed over. The product is the same, but outliers are spread. True: grad_weight, 16.
    Not for convolutions larger than 1 x 1.

    A granularity of block formats may say more after slashes, as "nvfp4/16x16": square blocks, FP32
    scales of rows, two scales to choose from, other roundings. docs/formats.md has the list.

    products: recipes of the other two products, by their name above: {"grad_weight": "bf16"}
    computes it in bf16, where forward and grad_input have the formats of this recipe. x, w and g
    are cast once for each recipe that reads them, and what is saved for backward is what the
    backward products read: with a grad_weight in bf16, x in bf16. Neither fp16, which needs loss
    scaling, nor, in products, delayed scaling.

    backward: "bf16" is short for both `products` in bf16. "dequantized": x and w are, for the
    backward products, what forward saw of them: cast, decoded to their own dtype, and then cast as
    `products` says, which is "bf16" for both if left out; one that it does not name is cast as for
    the forward product.

    outliers: of the K input features of a linear layer, the share (0.01: one in a hundred, rounded
    up) that all three products read in bf16: with the indices O of these features and the other
    ones R,

        y           = q(x_R) @ q(w_R)^T + bf16(x_O) @ bf16(w_O)^T   one FP32 sum, rounded once
        grad of x   = q(g) @ q(w_R) in columns R,    bf16(g) @ bf16(w_O) in columns O
        grad of w   = q(g)^T @ q(x_R) in columns R,  bf16(g)^T @ bf16(x_O) in columns O

    where q casts x_R and w_R as x and w with zeros in columns O, so that scales and blocks are
    those of the other features. Layers keep O in a buffer, which `mixprec.choose_outliers` sets.

    clip_activations, for fp16 only: finite values of an fp16 output y that would overflow to Inf
    become +-65504, are counted in the layer's buffer `clipped`, and have gradient 0. By default
    they become Inf.

    Raises ValueError, listing valid values, for unknown or contradictory settings.

    Sources: Mixed Precision Training (Micikevicius et al., 2018) for "fp16"; FP8 Formats for Deep
    Learning (Micikevicius et al., 2022) for E4M3 values with E5M2 gradients, "fp8" and
    "fp8-delayed"; E4M3 for all where scales are finer, "fp8-rowwise", as in torchao, and
    "fp8-block", as in the DeepSeek-V3 report (2024); OCP Microscaling Formats (MX) 1.0 (2023) for
    "mx"; Recipes for Pre-training LLMs with MXFP8 (Mishra et al., 2025) for "mxfp8"; Training LLMs
    with MXFP4 (Tseng et al., 2025) for stochastic_rounding in "mxfp4"; Pretraining Large Language
    Models with NVFP4 (NVIDIA, 2025) for "nvfp4"; Four Over Six (Cook et al., 2025); Quartet II
    (Panferov et al., 2026); TetraJet-v2 (2025), without its control of oscillation.
    """

    name: str
    x: Format
    w: Format
    g: Format
    power_of_two_scale: bool = True
    x_granularity: str = "tensor"
    w_granularity: str = "tensor"
    g_granularity: str = "tensor"
    scaling: str = "current"
    history: int | None = None
    amax_of: str | None = None
    margin: int = 0
    fast_accum: tuple[str, ...] = ()
    products: tuple[tuple[str, Recipe], ...] = ()
    clip_activations: bool = False
    scale_mode: str = "rceil"
    stochastic_rounding: tuple[str, ...] = ()
    hadamard: Any = ()
    outliers: float = 0.0
    backward: str | None = None

    def __eq__(self, other: object) -> bool:
        # By a string: torch.compile makes a float that differs between models unknown.
        return isinstance(other, Recipe) and bool(self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for field in fields(self):  # what follows from them is not that of another version
            self._set(field.name, state.get(field.name, field.default))
        self.__post_init__()

    def product(self, name: str) -> Recipe:
        """How "forward", "grad_input" or "grad_weight" is computed: a recipe without `products` and
        `outliers`, this one if it has none."""
        recipe: Recipe = self._product[name]
        return recipe

    @property
    def without_outliers(self) -> Recipe:
        """For layers that cannot have them."""
        if not self.outliers:
            return self
        kept = (part for part in self.name.split("+") if not part.startswith(_OUTLIERS))
        return replace(self, name="+".join(kept), outliers=0.0)

    def outlier_count(self, features: int) -> int:
        """How many of so many input features are outliers."""
        return math.ceil(self.outliers * features - 1e-9)  # 0.07 * 100 is above 7

    def casts(self, role: str) -> tuple[Recipe, Recipe]:
        """How the operand "x", "w" or "g" is cast: as it is, and its transpose, for the two
        products of `READ_BY`."""
        pair: tuple[Recipe, Recipe] = self._casts[role]
        return pair

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype of values that are not cast, as between fused products."""
        return torch.float16 if self.x == FP16 else torch.bfloat16

    def block_format(self, role: str) -> str | None:
        """How `dequantize_mx` names what "x", "w" or "g" is stored in, None for no block format."""
        stored: str | None = self._stored[role]
        return stored

    def block_cast(self, role: str) -> str:
        """How one in a block format is cast, as `quantize_mx` names it."""
        text: str | None = self._texts[role]
        assert text is not None, "is_block"
        return text

    def rotation(self, product: str) -> int:
        """The size of `hadamard` for a product; 0 for none."""
        return dict(self.hadamard).get(product, 0)

    @property
    def forward(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of y = x @ w^T."""
        return self.x, self.w

    @property
    def grad_input(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of g @ w."""
        recipe = self.product("grad_input")
        return recipe.g, recipe.w

    @property
    def grad_weight(self) -> tuple[Format, Format]:
        """The operand formats (a, b) of g^T @ x."""
        recipe = self.product("grad_weight")
        return recipe.g, recipe.x

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients underflow unless the loss is scaled: with fp16, whose exponent
        range is short and which, unlike FP8 here, is cast without a scale."""
        return self.g == FP16

    def __str__(self) -> str:
        if self.products or self.outliers:
            parts = [str(self.product("forward"))]
            parts += [f"{name} in {recipe}" for name, recipe in self.products]
            parts += [f"backward of {self.backward} x and w"] if self.backward else []
            parts += [f"{self.outliers:.2%} of the features in bf16"] if self.outliers else []
            return "; ".join(parts)
        if not self.is_scaled:
            parts = [self.name if self.name == self.x.name else f"{self.name}: {self.x}"]
            return ", ".join([*parts, *(["clip_activations"] if self.clip_activations else [])])
        roles = (f"{r} {getattr(self, r)}/{getattr(self, f'{r}_granularity')}" for r in ROLES)
        parts = [f"{self.name}: {', '.join(roles)}"]
        if self.is_delayed:
            parts.append(f"delayed({self.history},{self.amax_of})")
        parts += [f"margin {self.margin}"] if self.margin else []
        parts += [] if self.power_of_two_scale else ["any scale"]
        parts += [f"fast_accum({','.join(self.fast_accum)})"] if self.fast_accum else []
        parts += [] if self.scale_mode == "rceil" else [f"scale_mode {self.scale_mode}"]
        stochastic = ",".join(self.stochastic_rounding)
        parts += [f"stochastic_rounding({stochastic})"] if stochastic else []
        rotated = ",".join(f"{name} {size}" for name, size in self.hadamard)
        usual = "hadamard" if rotated == "grad_weight 16" else f"hadamard({rotated})"
        parts += [usual] if rotated else []
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """All settings, as strings, numbers and lists: for JSON and for checkpoints."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {role: values[role].name for role in ROLES}
        values |= {name: list(values[name]) for name in ("fast_accum", "stochastic_rounding")}
        values["hadamard"] = dict(self.hadamard)
        values["products"] = {name: recipe.to_dict() for name, recipe in self.products}
        return {**values, "version": 1}

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` described; ValueError naming what is missing or unknown."""
        known = [field.name for field in fields(Recipe)]
        given = dict(settings)
        if (version := given.pop("version", 1)) != 1:
            raise ValueError(f"Recipe.from_dict: version must be 1, got {version!r}")
        unknown, missing = given.keys() - known, {"name", *ROLES} - given.keys()
        if unknown or missing:
            raise ValueError(
                f"Recipe.from_dict: settings must be some of {', '.join(known)}, with name, x, w "
                f"and g; unknown: {sorted(unknown)}, missing: {sorted(missing)}"
            )
        products = dict(given.pop("products", {})).items()
        return Recipe(**given, products=tuple((n, Recipe.from_dict(r)) for n, r in products))

    @staticmethod
    def parse(recipe: Recipe | str | torch.dtype) -> Recipe:
        """Return `recipe` itself, or the recipe of that name, alias or 16-bit dtype of torch.

        Names: those of `RECIPES`. With "+gi-" or "+gw-" and another name, the grad_input or the
        grad_weight product is computed by that: "fp8-rowwise+gw-bf16". With "+outliers-" and a
        number, it has these `outliers`: "mxfp4+outliers-0.01". Aliases: the names used by
        Keras ("mixed_bfloat16"), of jmp ("params=float32,compute=bfloat16,output=float32"), of
        torch's dtypes, of torchao, Megatron and Transformer Engine ("hybrid"); all in
        `mixprec._recipe_checks`, upper or lower case, with "-" or "_". ValueError lists the names,
        and the one that a misspelt name resembles, or says what to use for a name or dtype that is
        no recipe ("int8", "e4m3", "amp", torch.float8_e4m3fn).
        """
        if isinstance(recipe, Recipe):
            return recipe
        nearest = ""
        if isinstance(recipe, (str, torch.dtype)):
            name = _recipe_checks.name_of(str(recipe).strip().lower())
            if "+" in name:
                return _mixed(str(recipe), *name.split("+"))
            if named := RECIPES.get(name):
                return named
            if near := difflib.get_close_matches(name, [*RECIPES, *_recipe_checks.NAMES], 1):
                nearest = f'; did you mean "{near[0]}"?'
        names = ", ".join(f'"{name}"' for name in RECIPES)
        raise ValueError(f"recipe must be {names} or a mixprec.Recipe, got {recipe!r}{nearest}")


def _mixed(given: str, first: str, *others: str) -> Recipe:
    """The recipe of a name like "fp8-rowwise+gw-bf16+outliers-0.01"."""
    base = Recipe.parse(first)
    parts: dict[str, str] = {}
    for prefix in (*PREFIXES.values(), _OUTLIERS):
        mine = [other.removeprefix(prefix) for other in others if other.startswith(prefix)]
        parts |= {prefix: mine[0]} if len(mine) == 1 else {}
    share = parts.get(_OUTLIERS, "0")
    try:
        outliers = float(share)
    except ValueError:
        parts.clear()
    if len(parts) < len(others):
        raise ValueError(
            "recipe must be NAME with some of +gi-NAME, +gw-NAME and +outliers-SHARE, such as "
            f'"fp8+gw-bf16" or "mxfp4+outliers-0.01", got {given!r}'
        )
    products = {n: Recipe.parse(parts[p]) for n, p in PREFIXES.items() if p in parts}
    name = [base.name, *(PREFIXES[n] + r.name for n, r in products.items() if r != base)]
    name += [f"{_OUTLIERS}{outliers}"] if outliers else []
    return replace(base, name="+".join(name), products=tuple(products.items()), outliers=outliers)


def _all(x: str, w: str | None = None, g: str | None = None) -> Any:
    return {"x_granularity": x, "w_granularity": w or x, "g_granularity": g or x}


def _nvfp4(name: str, *granularities: str, **settings: Any) -> Recipe:
    """Gradients rounded at random, and a rotated grad_weight: NVIDIA's recipe but for the scales,
    which the granularities say."""
    usual: Any = {"stochastic_rounding": ("g",), "hadamard": True, **_all(*granularities)}
    return Recipe(name, E2M1, E2M1, E2M1, **usual | settings)


def _from_cast(name: str, forward: str, backward: str, size: int) -> Recipe:
    """Both backward products rotated, of x and w as forward saw them, all rounded at random."""
    sizes = dict.fromkeys(PREFIXES, size)
    product = _nvfp4(f"{name}-backward", backward, stochastic_rounding=ROLES, hadamard=sizes)
    how: Any = {"products": dict.fromkeys(PREFIXES, product), "backward": "dequantized"}
    return _nvfp4(name, forward, stochastic_rounding=(), hadamard=(), **how)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", BF16, BF16, BF16),
        Recipe("fp16", FP16, FP16, FP16),
        Recipe("fp8", E4M3, E4M3, E5M2),
        Recipe("fp8-delayed", E4M3, E4M3, E5M2, scaling="delayed"),
        Recipe("fp8-rowwise", E4M3, E4M3, E4M3, **_all("row")),
        Recipe(
            *("fp8-block", E4M3, E4M3, E4M3),
            x_granularity="block1x128",
            w_granularity="block128x128",
            g_granularity="block1x128",
        ),
        Recipe("mxfp8", E4M3, E4M3, E4M3, **_all("mx")),
        Recipe("mxfp8-32x32", E4M3, E4M3, E4M3, **_all("mx", "mx/32x32")),
        Recipe("mxfp4", E2M1, E2M1, E2M1, **_all("mx"), stochastic_rounding=("g",)),
        _nvfp4("nvfp4", "nvfp4/nearest", "nvfp4/16x16/nearest", "nvfp4/nearest"),
        _nvfp4("nvfp4-1x16", "nvfp4"),
        _nvfp4("nvfp4-rowwise", "nvfp4/row/nearest", "nvfp4/16x16/nearest", "nvfp4/row/nearest"),
        _nvfp4("nvfp4-4over6", *["nvfp4/mae/max256"] * 2, "nvfp4/nearest"),
        _from_cast("quartet2", "nvfp4/mse/max256", "nvfp4/eden", 128),
        _from_cast("tetrajet", "nvfp4/1x128", "nvfp4/1x128/nearest", 16),
    )
}

# Of the products of features that are outliers: only `mixprec.functional` computes with it.
OUTLIERS = Recipe("outliers", BF16, BF16, BF16)
