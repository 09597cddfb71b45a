"""Names that other libraries use for our recipes, and what to use in place of others."""

from __future__ import annotations

_ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "nvfp4": "nvfp4-1x16",  # the published recipe of this name has 16 x 16 blocks for weights
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
    "nvfp4blockscaling": "nvfp4-1x16",  # whose weights have blocks of 16 x 16 there
    "hybrid": "fp8",  # its Format: E4M3 forward, E5M2 backward
    # Megatron-LM: --fp8-recipe
    "delayed": "fp8-delayed",
    "blockwise": "fp8-block",
}

NAMES = tuple(_ALIASES)

_PLAIN = 'it is no recipe of convert: leave the model as it is (mixprec.compare takes "fp32")'
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
_NO_INT4 = 'there is no such format; the 4-bit recipes are "nvfp4-1x16" and "mxfp4"'
_NF4 = "it is for weights that do not change: load the model with bitsandbytes"
_WHICH_FP4 = 'it names no scales: "nvfp4-1x16" (blocks of 16) or "mxfp4" (blocks of 32)'
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
