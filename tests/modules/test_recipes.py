"""Recipe: what the names mean, whose words are understood, and what contradicts itself."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from cases import for_each

from mixprec.formats import E4M3, E5M2
from mixprec.recipes import GEMMS, RECIPES, Recipe

FP8 = "x e4m3/tensor, w e4m3/tensor, g e5m2/tensor"
NVFP4 = "x e2m1/nvfp4, w e2m1/nvfp4, g e2m1/nvfp4"
PUBLISHED = (
    "x e2m1/nvfp4{0}/nearest, w e2m1/nvfp4/16x16/nearest, g e2m1/nvfp4{0}/nearest, "
    "stochastic_rounding(g), hadamard"
)


def from_cast(name: str, forward: str, backward: str, size: int) -> str:
    """What a recipe prints whose backward products, both rotated, read what forward saw."""
    first, second = (
        ", ".join(f"{r} e2m1/nvfp4/{how}" for r in "xwg") for how in (forward, backward)
    )
    product = f"{name}-backward: {second}, stochastic_rounding(x,w,g)"
    product += f", hadamard(grad_input {size},grad_weight {size})"
    parts = [f"{name}: {first}", f"grad_input in {product}", f"grad_weight in {product}"]
    return "; ".join([*parts, "backward of dequantized x and w"])


def test_the_named_recipes() -> None:
    assert {name: str(recipe) for name, recipe in RECIPES.items()} == {
        "bf16": "bf16",
        "fp16": "fp16",
        "fp8": f"fp8: {FP8}",
        "fp8-delayed": f"fp8-delayed: {FP8}, delayed(16,max)",
        "fp8-rowwise": "fp8-rowwise: x e4m3/row, w e4m3/row, g e4m3/row",
        "fp8-block": "fp8-block: x e4m3/block1x128, w e4m3/block128x128, g e4m3/block1x128",
        "mxfp8": "mxfp8: x e4m3/mx, w e4m3/mx, g e4m3/mx",
        "mxfp4": "mxfp4: x e2m1/mx, w e2m1/mx, g e2m1/mx, stochastic_rounding(g)",
        "mxfp8-32x32": "mxfp8-32x32: x e4m3/mx, w e4m3/mx/32x32, g e4m3/mx",
        "nvfp4": f"nvfp4: {PUBLISHED.format('')}",
        "nvfp4-1x16": f"nvfp4-1x16: {NVFP4}, stochastic_rounding(g), hadamard",
        "nvfp4-rowwise": f"nvfp4-rowwise: {PUBLISHED.format('/row')}",
        "nvfp4-4over6": "nvfp4-4over6: x e2m1/nvfp4/mae/max256, w e2m1/nvfp4/mae/max256, "
        "g e2m1/nvfp4/nearest, stochastic_rounding(g), hadamard",
        "quartet2": from_cast("quartet2", "mse/max256", "eden", 128),
        "tetrajet": from_cast("tetrajet", "1x128", "1x128/nearest", 16),
    }


@for_each(
    "name, changes, words",
    [
        (
            "fp8-delayed",
            {"history": 4, "amax_of": "most_recent", "margin": 1},
            f"fp8-delayed: {FP8}, delayed(4,most_recent), margin 1",
        ),
        (
            "fp8",
            {"power_of_two_scale": False, "fast_accum": ["forward"]},
            f"fp8: {FP8}, any scale, fast_accum(forward)",
        ),
        (
            "mxfp4",
            {"x": "e3m2", "scale_mode": "even", "stochastic_rounding": ["g", "x"]},
            "mxfp4: x e3m2/mx, w e2m1/mx, g e2m1/mx, scale_mode even, stochastic_rounding(x,g)",
        ),
    ],
)
def test_a_recipe_prints_all_of_itself(name: str, changes: dict[str, object], words: str) -> None:
    recipe = replace(RECIPES[name], **changes)
    assert str(recipe) == words
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_what_follows_from_the_formats() -> None:
    properties = {
        "needs_loss_scaling": {"fp16"},
        "is_scaled": RECIPES.keys() - {"bf16", "fp16"},
        "is_block": {
            name for name in RECIPES if name.startswith(("mx", "nv", "quartet2", "tetra"))
        },
        "is_fp8": {"fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp8-32x32"},
        "is_delayed": {"fp8-delayed"},
    }
    for property, names in properties.items():
        assert {name for name, recipe in RECIPES.items() if getattr(recipe, property)} == names
    fp8 = RECIPES["fp8"]
    assert fp8.forward == (E4M3, E4M3)
    assert fp8.grad_input == fp8.grad_weight == (E5M2, E4M3)
    formats = {"fp8-block": None, "mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4", "nvfp4-1x16": "nvfp4"}
    assert {name: RECIPES[name].block_format("g") for name in formats} == formats


def test_recipes_are_values() -> None:
    own = Recipe("own", "float8_e5m2", torch.float8_e4m3fn, E5M2)
    assert (own.x, own.w, own.grad_input) == (E5M2, E4M3, (E5M2, E4M3))
    assert Recipe.parse(own) is own
    with pytest.raises(FrozenInstanceError):
        own.x = E4M3  # type: ignore[misc]
    fp8 = Recipe.parse("FP8")
    assert fp8 == replace(fp8) == Recipe("fp8", E4M3, E4M3, E5M2)
    assert len({fp8, replace(fp8), replace(fp8, scaling="delayed")}) == 2
    assert replace(fp8, fast_accum=True).fast_accum == GEMMS
    assert replace(fp8, fast_accum=False).fast_accum == ()
    assert replace(fp8, fast_accum=["grad_weight", "forward"]).fast_accum == GEMMS[::2]


def test_damaged_dicts_are_refused() -> None:
    settings = Recipe.parse("fp8").to_dict()
    with pytest.raises(ValueError, match=r"unknown: \['scale'\], missing: \['g', 'x'\]"):
        Recipe.from_dict({"name": "fp8", "w": "e4m3", "scale": 2})
    with pytest.raises(ValueError, match="version must be 1, got 2"):
        Recipe.from_dict({**settings, "version": 2})
    with pytest.raises(ValueError, match="Recipe fp8: scaling must be one of 'current', 'delayed'"):
        Recipe.from_dict({**settings, "scaling": "later"})
    assert Recipe.from_dict({k: settings[k] for k in ("name", "x", "w", "g")}).name == "fp8"
    renamed = RECIPES["nvfp4-1x16"].to_dict() | {"name": "nvfp4"}  # as older versions wrote it
    assert replace(Recipe.from_dict(renamed), name="nvfp4-1x16") == RECIPES["nvfp4-1x16"]


NAMES = {
    "bf16": ["mixed_bfloat16", "bfloat16", torch.bfloat16, str(torch.bfloat16), "bf16-mixed",
             "compute=bf16", "params=float32,compute=bfloat16,output=float32"],
    "fp16": ["mixed_float16", "16-mixed", torch.float16, "p=f32,c=f16,o=f32",
             "params=full, compute=half, output=float32"],
    "fp8": ["tensorwise", "Float8CurrentScaling", "HYBRID"],
    "fp8-rowwise": ["rowwise"],
    "fp8-delayed": ["DelayedScaling", "fp8_delayed"],
    "fp8-block": ["Float8BlockScaling", " FP8-Block ", "blockwise"],
    "mxfp8": ["MXFP8BlockScaling"],
    "nvfp4": ["NVFP4", "NVFP4BlockScaling"],
    "mxfp4": ["MXFP4"],
}  # fmt: skip


@for_each("name", NAMES)
def test_names_in_other_libraries(name: str) -> None:
    for word in NAMES[name]:
        assert Recipe.parse(word) is RECIPES[name], word


VALID = ", ".join(f'"{name}"' for name in RECIPES)


@for_each(
    "word, reason",
    [
        ("fp32", r'recipe "fp32" is not supported: .* leave the model as it is'),
        ("params=f32,compute=f32,output=f32", "leave the model as it is"),
        ("int8", r'"int8" is not supported: .* mixprec.freeze\(model, "int8"\)'),
        ("nf4", "for weights that do not change: load the model with bitsandbytes"),
        ("E4M3", r"has three: .* mixprec.Recipe\(name, x, w, g\)"),
        (torch.float8_e4m3fn, r'"float8_e4m3fn" .* it is a format, of which a recipe'),
        ("amp", '"bf16" where the processor has it'),
        ("O2", r"mixprec.cast_parameters\(model, torch.bfloat16\) casts the weights"),
        ("fp4", 'names no scales: "nvfp4"'),
        ("tf32", "set_float32_matmul_precision"),
        ("params=bfloat16,compute=bfloat16", "mixprec.cast_parameters casts them"),
        ("params=float32", "must say what to compute in"),
        ("compute=bf16,compute=bf16", "must be a policy such as"),
        ("fp8-rowise", r"""got 'fp8-rowise'; did you mean "fp8-rowwise"\?$"""),
        *(
            (wrong, f"recipe must be {VALID} or a mixprec.Recipe, got")
            for wrong in ("xyz", "", None, torch.complex64, 8)
        ),
    ],
)
def test_names_without_a_counterpart_are_told_why(word: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Recipe.parse(word)


@for_each(
    "name, settings, match",
    [
        ("bf16", {"g": "fp16"}, "all FP8, all fp16 or all bf16"),
        ("fp8", {"g": "e3m4"}, "Recipe: g: fmt must be one of"),
        ("fp8", {"scaling": "static"}, "scaling must be one of 'current', 'delayed', got 'static'"),
        ("fp8", {"w_granularity": "column"}, "w_granularity must be one of 'tensor', 'row', 'blo"),
        ("fp8", {"history": 16}, "history must be None unless scaling is 'delayed', got 16"),
        ("fp8", {"margin": 1}, "margin must be 0 unless scaling is 'delayed', got 1"),
        ("fp8", {"power_of_two_scale": 2}, "power_of_two_scale must be True or False, got 2"),
        ("fp8", {"fast_accum": "forward"}, "fast_accum must be True, False or some of"),
        ("fp8", {"name": ""}, "name must be a string that says something"),
        ("fp8-rowwise", {"scaling": "delayed"}, "x_granularity must be 'tensor', the only one"),
        ("fp8-delayed", {"history": 0}, "history must be an int of 1 or more, got 0"),
        ("fp8-delayed", {"amax_of": "mean"}, "amax_of must be one of 'max', 'most_recent'"),
        ("fp8-delayed", {"margin": 65}, "margin must be an int between -64 and 64, got 65"),
        ("bf16", {"scaling": "delayed"}, "scaling must be 'current': bf16 operands have no scale"),
        ("fp8", {"clip_activations": True}, "clip_activations must be False: .* and x is e4m3"),
        ("fp8", {"x": "e2m1"}, "x_granularity must be 'mx' or 'nvfp4' for e2m1, got 'tensor'"),
        ("fp8", {"w_granularity": "nvfp4"}, "x_granularity must be 'mx' for e4m3, because all th"),
        ("nvfp4-1x16", {"g": "e4m3"}, "g_granularity must be 'mx' for e4m3, .* got 'nvfp4'"),
        ("mxfp8", {"scaling": "delayed"}, "scaling must be 'current': block formats have their"),
        ("mxfp8", {"scale_mode": "up"}, "scale_mode must be one of 'floor', "),
        ("nvfp4", {"scale_mode": "even"}, "scale_mode must be 'rceil': 'nvfp4' has no scales"),
        ("mxfp4", {"stochastic_rounding": "g"}, "stochastic_rounding must be some of"),
        ("mxfp4", {"hadamard": 1}, "hadamard must be True, False or sizes, .*got 1"),
        ("nvfp4", {"hadamard": {"forward": 16}}, "hadamard must be True, False or sizes, .* got"),
        ("nvfp4", {"hadamard": {"grad_weight": 8}}, "sizes, of .16, 32, 64, 128., of some of"),
        ("nvfp4", {"hadamard": ("grad_weight", 16)}, "sizes, of .16, 32, 64, 128., of some of"),
        ("nvfp4", {"hadamard": {"grad_weight": [16]}}, "sizes, of .16, 32, 64, 128., of some of"),
        ("nvfp4", {"w_granularity": "nvfp4/32x32"}, "fmt must have parts that go together"),
        ("nvfp4", {"x_granularity": "nvfp4/7over6"}, "after slashes some of 32x32, .*nvfp4/7over6"),
        ("fp8", {"x_granularity": "tensor/16x16"}, "x_granularity must be 'tensor' or .* for e4m3"),
        ("fp8", {"backward": "fp32"}, "backward must be one of None, 'dequantized', 'bf16'"),
        ("fp8", {"backward": "bf16", "products": {"grad_weight": "mxfp8"}}, "with products"),
        ("fp8", {"hadamard": True}, "hadamard must be .*: it is for the block formats"),
        ("bf16", {"stochastic_rounding": ("g",)}, r"stochastic_rounding must be \(\): bf16 oper"),
    ],
)
def test_contradictions_are_refused(name: str, settings: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(RECIPES[name], **settings)
