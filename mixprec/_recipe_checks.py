"""The settings of a Recipe: valid, consistent, and in one form each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from . import formats
from .formats import BF16, E4M3, E5M2, FP16
from .ops._reference import block_formats

if TYPE_CHECKING:
    from .recipes import Recipe

GEMMS = ("forward", "grad_input", "grad_weight")
BLOCKS = block_formats.GRANULARITIES
GRANULARITIES = ("tensor", "row", "block1x128", "block128x128", *BLOCKS)
SCALINGS = ("current", "delayed")
AMAX_OF = ("max", "most_recent")
ROLES = ("x", "w", "g")
# The products that read an operand: the first as it is, the second its transpose.
READ_BY = {
    "x": ("forward", "grad_weight"),
    "w": ("forward", "grad_input"),
    "g": ("grad_input", "grad_weight"),
}
_PLAIN_PRODUCT: Any = {"products": (), "outliers": 0.0, "backward": None}
_OF_BLOCKS = ("scale_mode", "stochastic_rounding", "hadamard")
_NOT_OF_BLOCKS = ("power_of_two_scale", "scaling", "fast_accum")


class Checked:
    """What `Recipe` checks of its fields when it is made, and what follows from them.

    is_scaled: whether there are operands with scales: FP8 and the block formats, not 16 bits.
    is_fp8: whether all operands have 8 bits: FP8, in blocks or not, but not fewer. is_block:
    whether there are operands in block formats, granularity "mx" or "nvfp4". is_delayed: whether
    layers keep a history of amax, which `mixprec.update_scales` rolls. is_random: whether there are
    operands that are rounded stochastically. has_outliers: whether `outliers` is not 0. code: the
    casts, for `mixprec.ops.linear_pass`; None where a product has a recipe of its own, or an
    operand is split, rotated, in no stored format's own blocks or, other than g, rounded at random.
    unrotated: this recipe without `hadamard`.
    """

    is_scaled: bool
    is_fp8: bool
    is_block: bool
    is_delayed: bool
    is_random: bool
    has_outliers: bool
    code: int | None
    unrotated: Recipe

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, field: str) -> Any: ...

        @staticmethod
        def parse(recipe: Recipe | str) -> Recipe: ...

    def __post_init__(self) -> None:
        """ValueError, listing valid values, for unknown or contradictory settings."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"Recipe: name must be a string that says something, got {self.name!r}"
            )
        for role in ROLES:
            self._set(role, formats.parse(getattr(self, role), who=f"Recipe: {role}"))
            kind = str(getattr(self, f"{role}_granularity")).partition("/")[0]
            names = ", ".join(map(repr, GRANULARITIES))
            self._is(f"{role}_granularity", kind in GRANULARITIES, f"one of {names}")
        self._one_of("scaling", SCALINGS)
        self._one_of("scale_mode", block_formats.SCALE_MODES)
        for field in ("power_of_two_scale", "clip_activations"):
            self._is(field, isinstance(getattr(self, field), bool), "True or False")
        if isinstance(self.fast_accum, bool):
            self._set("fast_accum", GEMMS if self.fast_accum else ())
        self._some_of("fast_accum", GEMMS, "True, False or ")
        self._some_of("stochastic_rounding", ROLES)
        self._check_hadamard()
        self._check_formats()
        self._check_blocks()
        self._check_delayed()
        self._check_outliers()
        self._check_backward()
        self._check_products()
        self._derive()

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the way to normalise a field when frozen

    def _is(self, field: str, valid: bool, meaning: str) -> None:
        if not valid:
            got = getattr(self, field)
            raise ValueError(f"Recipe {self.name}: {field} must be {meaning}, got {got!r}")

    def _one_of(self, field: str, valid: tuple[str | None, ...]) -> None:
        self._is(field, getattr(self, field) in valid, "one of " + ", ".join(map(repr, valid)))

    def _some_of(self, field: str, names: tuple[str, ...], more: str = "") -> None:
        """A collection of names, as a tuple in their order."""
        given = getattr(self, field)
        listed = not isinstance(given, str) and isinstance(given, Iterable)
        self._is(field, listed and set(given) <= set(names), f"{more}some of {names}")
        self._set(field, tuple(name for name in names if name in given))

    def _check_formats(self) -> None:
        is_scaled = all(fmt.bits <= 8 for fmt in (self.x, self.w, self.g))
        if not is_scaled and not self.x == self.w == self.g:
            raise ValueError(
                f"Recipe: x, w and g must be all FP8, all fp16 or all bf16, or all block formats, "
                f"got x {self.x}, w {self.w}, g {self.g}"
            )
        no_clip = f"False: it is for outputs of fp16 operands, and x is {self.x}"
        self._is("clip_activations", self.x == FP16 or not self.clip_activations, no_clip)
        if is_scaled:
            return
        free = ("clip_activations", "products", "backward")
        others = [field.name for field in fields(self)[4:] if field.name not in free]
        self._are_default(others, f"{self.x} operands have no scale (FP8 formats: e4m3, e5m2)")

    def _check_blocks(self) -> None:
        """Settings of block formats, all three or none."""
        if self.x.bits > 8:
            return
        granularities = {role: getattr(self, f"{role}_granularity") for role in ROLES}
        kinds = {role: granularity.partition("/")[0] for role, granularity in granularities.items()}
        blocks = any(kind in BLOCKS for kind in kinds.values())
        reason = ", because all three operands have block formats or none" if blocks else ""
        for role, granularity in granularities.items():
            fmt = getattr(self, role)
            allowed = [name for name in BLOCKS if block_formats.name_of(fmt, name)]
            if not blocks and fmt in (E4M3, E5M2):
                allowed = [*GRANULARITIES]
            meaning = f"{' or '.join(map(repr, allowed))} for {fmt}{reason}"
            known = granularity in allowed or (kinds[role] in allowed and kinds[role] in BLOCKS)
            self._is(f"{role}_granularity", known, meaning)
            if text := block_formats.name_of(fmt, granularity):
                block_formats.parse(f"Recipe {self.name}: {role}_granularity", text)
        if blocks:
            self._are_default(_NOT_OF_BLOCKS, "block formats have their own scales and sums")
            if {*kinds.values()} == {"nvfp4"}:
                self._are_default(("scale_mode",), "'nvfp4' has no scales that are powers of two")
        else:
            self._are_default(_OF_BLOCKS, "it is for the block formats, 'mx' and 'nvfp4'")

    def _are_default(self, names: Iterable[str], reason: str) -> None:
        for field in fields(self):
            if field.name in names:
                given = getattr(self, field.name)
                self._is(field.name, given == field.default, f"{field.default!r}: {reason}")

    def _check_delayed(self) -> None:
        """Settings of delayed scaling only."""
        if self.scaling == "current":
            for field, nothing in (("history", None), ("amax_of", None), ("margin", 0)):
                given = getattr(self, field)
                self._is(field, given == nothing, f"{nothing} unless scaling is 'delayed'")
            return
        for role in ROLES:
            field = f"{role}_granularity"
            per_tensor = getattr(self, field) == "tensor"
            self._is(field, per_tensor, "'tensor', the only one that delayed scaling has")
        if self.history is None:
            self._set("history", 16)
        if self.amax_of is None:
            self._set("amax_of", "max")
        self._one_of("amax_of", AMAX_OF)
        length = self.history
        is_int = isinstance(length, int) and not isinstance(length, bool) and length >= 1
        self._is("history", is_int, "an int of 1 or more")
        is_int = isinstance(self.margin, int) and not isinstance(self.margin, bool)
        self._is("margin", is_int and -64 <= self.margin <= 64, "an int between -64 and 64")

    def _check_outliers(self) -> None:
        share = self.outliers
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        self._is("outliers", number and 0 <= share < 1, "a number of 0 or more, below 1")
        self._set("outliers", float(share))
        self._set("has_outliers", share > 0)  # for compiled code, in which a float is unknown

    def _check_hadamard(self) -> None:
        """The sizes of the backward products, as a tuple in their order."""
        given: Any = self.hadamard or ()
        if given is True:
            given = {"grad_weight": 16}
        elif not isinstance(given, (Mapping, tuple)):
            given = (given,)
        names, sizes = GEMMS[1:], (16, 32, 64, 128)
        pairs = [*(given.items() if isinstance(given, Mapping) else given or ())]
        valid = all(type(p) is tuple and len(p) == 2 and p[1] in sizes for p in pairs)
        sized = dict(pairs) if valid else {}
        valid = valid and {*sized} <= {*names}
        self._is("hadamard", valid, f"True, False or sizes, of {sizes}, of some of {names}")
        self._set("hadamard", tuple((name, sized[name]) for name in names if name in sized))

    def _check_backward(self) -> None:
        self._one_of("backward", (None, "dequantized", "bf16"))
        if self.backward == "bf16":
            self._is("backward", not self.products, "None or 'dequantized' with products")
        if self.backward and not self.products:
            self._set("products", dict.fromkeys(GEMMS[1:], "bf16"))
        if self.backward == "bf16":
            self._set("backward", None)

    def _check_products(self) -> None:
        """products, as a tuple in their order, without those that are as this recipe."""
        given, names = self.products, GEMMS[1:]
        valid = isinstance(given, (Mapping, tuple)) and {*dict(given)} <= {*names}
        self._is("products", valid, f'recipes of some of {names}, as {{"grad_weight": "bf16"}}')
        is_one = not given and not self.outliers
        name = self.name.split("+")[0]
        plain = self if is_one else replace(self, name=name, **_PLAIN_PRODUCT)
        parse = type(self).parse
        parsed = {name: parse(recipe) for name, recipe in dict(given).items()}
        for name, recipe in parsed.items():
            what = f"Recipe {self.name}: products: {name}"
            for field in _PLAIN_PRODUCT:
                if getattr(recipe, field):
                    raise ValueError(f"{what} must be a recipe without {field}, got {recipe.name}")
            if replace(recipe, name=plain.name) == plain and not self.backward:
                continue
            if FP16 in (self.x, recipe.x):
                raise ValueError(
                    f"{what} must not be {recipe.name} beside {self.x}: if one product is in fp16, "
                    "which needs loss scaling, all three are"
                )
            if recipe.is_delayed:
                raise ValueError(
                    f"{what} must not have delayed scaling, whose state is that of a layer's own "
                    f"recipe, got {recipe.name}"
                )
        kept = ((name, parsed[name]) for name in names if name in parsed)
        own = ((n, r) for n, r in kept if self.backward or replace(r, name=plain.name) != plain)
        self._set("products", tuple(own))
        self._set("_product", dict.fromkeys(GEMMS, plain) | dict(self.products))

    def _derive(self) -> None:
        """What is computed once, and read in each call of a layer."""
        each = [self, *(recipe for _, recipe in self.products)]
        self._set("_key", repr(self))
        self._set("_casts", {role: tuple(map(self._product.get, READ_BY[role])) for role in ROLES})
        self._set("is_scaled", any(recipe.x.bits <= 8 for recipe in each))
        self._set("is_fp8", all(f.bits == 8 for one in each for f in (one.x, one.w, one.g)))
        grains = [getattr(self, f"{role}_granularity") for role in ROLES]
        texts = [*map(block_formats.name_of, (self.x, self.w, self.g), grains)]
        self._set("_texts", dict(zip(ROLES, texts, strict=True)))
        stored = (text and block_formats.parse("Recipe", text).name for text in texts)
        self._set("_stored", dict(zip(ROLES, stored, strict=True)))
        self._set("is_block", any(recipe._texts["x"] is not None for recipe in each))
        self._set("unrotated", replace(self, hadamard=()) if self.hadamard else self)
        self._set("is_delayed", self.scaling == "delayed")
        self._set("is_random", any(recipe.stochastic_rounding for recipe in each))
        short = not (self.products or self.outliers or self.hadamard)
        short = short and {*texts} <= {None, *block_formats.BLOCK_FORMATS}
        short = short and {*self.stochastic_rounding} <= {"g"}
        codes = [self._code(role) << 10 * i for i, role in enumerate(ROLES)] if short else []
        self._set("code", sum(codes) if short else None)

    def _code(self, role: str) -> int:
        """How `role` is cast, as csrc/arguments/layer.h reads it."""
        fmt, granularity = getattr(self, role), getattr(self, f"{role}_granularity")
        mode = self.scale_mode if granularity == "mx" else block_formats.DEFAULT_SCALE_MODE
        rest = block_formats.SCALE_MODES.index(mode) << 6 | self.power_of_two_scale << 8
        if (name := self._texts[role]) is not None:
            return 5 | [*block_formats.BLOCK_FORMATS].index(name) << 3 | rest
        grain = 0 if fmt.bits == 16 else 1 + GRANULARITIES.index(granularity)
        return grain | (FP16, BF16, E4M3, E5M2).index(fmt) << 3 | rest


_ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    # Keras: mixed_precision.set_global_policy
    "mixed_float16": "fp16",
    "mixed_bfloat16": "bf16",
    # Lightning: Trainer(precision=...)
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    # torchao: Float8LinearConfig.from_recipe_name
    "tensorwise": "fp8",
    "rowwise": "fp8-rowwise",
    "rowwise_with_gw_hp": "fp8-rowwise+gw-bf16",  # whose weight has one scale in grad_input there
    # Transformer Engine: common.recipe. Ours rounds scales to powers of two, and the delayed one
    # looks back 16 steps, not 1024.
    "float8currentscaling": "fp8",
    "delayedscaling": "fp8-delayed",
    "float8blockscaling": "fp8-block",
    "mxfp8blockscaling": "mxfp8",
    "nvfp4blockscaling": "nvfp4",
    "hybrid": "fp8",  # its Format: E4M3 forward, E5M2 backward
    # Megatron-LM: --fp8-recipe
    "delayed": "fp8-delayed",
    "blockwise": "fp8-block",
}

NAMES = tuple(_ALIASES)

_PLAIN = "it is no recipe of convert: leave the model as it is"
_FORMAT = (
    'it is a format, of which a recipe has three: "fp8" has e4m3 for x and w and e5m2 for g, '
    '"fp8-rowwise" e4m3 for all; for others, mixprec.Recipe(name, x, w, g)'
)
_WHICH = (
    'it names no format: "bf16" where the processor has it, "fp16" with a mixprec.GradScaler '
    "elsewhere"
)
_WEIGHTS = (
    'convert(model, "bf16") or "fp16" sets what layers compute in, and '
    "mixprec.cast_parameters(model, torch.bfloat16) casts the weights"
)
_NO_INT4 = 'there is no such format; the 4-bit recipes are "nvfp4" and "mxfp4"'
_NF4 = "it is for weights that do not change: load the model with bitsandbytes"
_WHICH_FP4 = 'it names no scales: "nvfp4" (blocks of 16) or "mxfp4" (blocks of 32)'
_REFUSED = {
    **dict.fromkeys(("fp32", "float32", "full", "32", "32-true", "no", "none", "o0"), _PLAIN),
    **dict.fromkeys(("fp64", "float64", "double", "64-true"), _PLAIN),
    **dict.fromkeys(("e4m3", "e5m2", "e4m3fn", "float8_e4m3fn", "float8_e5m2"), _FORMAT),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), _FORMAT),
    **dict.fromkeys(("e2m1", "e3m2", "e2m3"), _FORMAT),
    **dict.fromkeys(("amp", "mixed", "mixed_precision", "autocast", "auto"), _WHICH),
    **dict.fromkeys(("o2", "o3", "16-true", "bf16-true"), _WEIGHTS),
    "o1": '"fp16" with a mixprec.GradScaler computes in the same precision',
    "tf32": 'it is for FP32 layers: torch.set_float32_matmul_precision("high"), without convert',
    "int8": 'it is not for training; mixprec.freeze(model, "int8") is for inference',
    **dict.fromkeys(("nf4", "qlora"), _NF4),
    "int4": _NO_INT4,
    "fp4": _WHICH_FP4,
}

# jmp.get_policy: "params=float32,compute=bfloat16,output=float32", or p=f32,c=bf16,o=f32
_JMP_KEYS = {"p": "params", "c": "compute", "o": "output"}
_JMP_TYPES = {
    **dict.fromkeys(("float32", "f32", "full"), "fp32"),
    **dict.fromkeys(("float16", "f16", "half"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
}


def name_of(alias: str) -> str:
    """The recipe name for `alias`, in lower case; `alias` with hyphens if it is not one.

    ValueError, with the reason or what to use, for a name that is no recipe here.
    """
    alias = alias.removeprefix("torch.")  # str(torch.bfloat16)
    if "=" in alias:
        alias = _compute_type(alias)
    if reason := _REFUSED.get(alias):
        raise ValueError(f'recipe "{alias}" is not supported: {reason}')
    return _ALIASES.get(alias, alias.replace("_", "-"))


def _compute_type(policy: str) -> str:
    """The compute dtype of a jmp policy. A recipe does not set parameter or output dtypes."""
    types = {}
    for part in policy.split(","):
        key, _, value = (side.strip() for side in part.partition("="))
        key = _JMP_KEYS.get(key, key)
        if key not in _JMP_KEYS.values() or key in types or value not in _JMP_TYPES:
            raise ValueError(
                f'recipe must be a policy such as "params=float32,compute=bfloat16,output=float32" '
                f"with types {', '.join(_JMP_TYPES)}, got {policy!r}"
            )
        types[key] = _JMP_TYPES[value]
    if "compute" not in types:
        raise ValueError(f"recipe must say what to compute in (compute=...), got {policy!r}")
    if types.get("params", "fp32") != "fp32":
        raise ValueError(
            f"recipe must leave parameters alone (params=float32), got {policy!r}: "
            "mixprec.cast_parameters casts them, for any recipe"
        )
    if types.get("output", "fp32") != "fp32":
        raise ValueError(
            f"recipe must have output=float32, got {policy!r}: an output has its input's dtype, "
            "so cast the model's input, or use torch.autocast"
        )
    return types["compute"]
