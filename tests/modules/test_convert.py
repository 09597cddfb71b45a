"""convert: what changes in a model, and everything that must not."""

from __future__ import annotations

import logging

import pytest
import torch
from cases import for_each
from torch import nn

from mixprec.nn import Conv2d, Linear
from mixprec.nn.convert import convert, convert_to_float8_training
from mixprec.nn.filters import worthwhile
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import BUFFERS


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """An output layer with the embedding's weight, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = self.blocks[0].up
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.again(x)[..., :16])


def snapshot(model: nn.Module) -> list[tuple[str, int, torch.dtype, bool]]:
    named = model.named_parameters(remove_duplicate=False)
    return [(fqn, id(p), p.dtype, p.requires_grad) for fqn, p in named]


@for_each("recipe", [*RECIPES, Recipe("own", "e4m3", "e4m3", "e4m3")])
def test_every_linear_is_replaced_and_no_parameter_touched(recipe: str | Recipe) -> None:
    model = Tied()
    model.blocks[1].up.weight.requires_grad_(False)
    before, keys = snapshot(model), list(model.state_dict())
    assert convert(model, recipe) is model
    assert snapshot(model) == before
    assert [key for key in model.state_dict() if not key.endswith(BUFFERS)] == keys
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    blocks = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")]
    assert list(linears) == [*blocks, "head"]
    for fqn, module in linears.items():
        assert type(module) is Linear
        assert (module.name, module.recipe) == (fqn, Recipe.parse(recipe))
    assert model.again is model.blocks[0].up
    assert model.head.weight is model.embedding.weight
    model(torch.arange(10)).sum().backward()
    assert model.embedding.weight.grad.dtype == torch.float32
    assert model.blocks[1].up.weight.grad is None


def test_filter_gets_the_module_its_path_and_its_recipe(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[nn.Module, str]] = []
    recipes: dict[str, str] = {}

    def only_up(module: nn.Module, fqn: str) -> bool:
        seen.append((module, fqn))
        return fqn.endswith("up")

    def every(module: nn.Module, fqn: str, recipe: Recipe) -> bool:
        recipes[fqn] = recipe.name
        return True

    model = nn.Sequential(Block(), nn.ModuleDict({"a": nn.Linear(4, 4)}))
    linears = [(m, fqn) for fqn, m in model.named_modules() if isinstance(m, nn.Linear)]
    with caplog.at_level(logging.INFO, logger="mixprec"):
        convert(model, "fp8", only_up)
    assert seen == linears
    kinds = [type(m) for m in (model[0].up, model[0].down, model[1]["a"])]
    assert kinds == [Linear, nn.Linear, nn.Linear]
    fp8 = "fp8: x e4m3/tensor, w e4m3/tensor, g e5m2/tensor"
    assert f"convert: 1 of 3 layers set to {fp8}: 49% of" in caplog.messages[-1]
    convert(Block(), "fp8", every, {"up": "bf16"})
    assert recipes == {"up": "bf16", "down": "fp8"}


def test_converting_again_sets_the_new_recipe(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Linear):
        pass

    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 4), "own": Own(4, 4)})
    before = snapshot(model)
    with caplog.at_level(logging.INFO, logger="mixprec"):
        convert(model, "fp8-rowwise", overrides={"stem": "bf16"})
        assert [type(m) for m in model.values()] == [Conv2d, Linear, Own]
        assert caplog.messages[-1].startswith("convert: 3 of 3 layers set to bf16 (1); ")
        modules = list(model.values())
        convert(model, "fp8-delayed")
        model["stem"].scale.fill_(8.0)
        convert(model, "fp8-delayed")
        assert caplog.messages[-1].endswith("(3 had it already): 100% of the weights")
    assert model["stem"].scale.tolist() == [8.0] * 2, "twice the same changes nothing"
    assert [(m.recipe.name, m.name) for m in modules] == [("fp8-delayed", n) for n in model]
    convert(model, "bf16", lambda module, fqn: fqn == "head")
    assert list(model.values()) == modules
    assert [m.recipe.name for m in modules] == ["fp8-delayed", "bf16", "fp8-delayed"]
    keys = ["weight", "bias", *BUFFERS]
    assert [list(m.state_dict()) for m in modules] == [keys, keys[:2], keys]
    assert snapshot(model) == before


def test_convert_refuses_before_it_changes_anything() -> None:
    for second in (nn.Linear(4, 4), nn.Conv2d(1, 1, 1)):
        model = nn.Sequential(nn.Linear(4, 4), second)
        second.forward = second.forward
        with pytest.raises(ValueError, match="1 has its own forward"):
            convert(model, "fp8")
        assert type(model[0]) is nn.Linear
    for wrong in ({"recipe": "fp9"}, {"overrides": {"0": "fp9"}}):
        with pytest.raises(ValueError, match=r"recipe must be .* got 'fp9'"):
            convert(model, **wrong)
    with pytest.raises(TypeError, match="convert: fuse must be True or False, got 'yes'"):
        convert(model, "bf16", fuse="yes")
    assert type(model[0]) is nn.Linear
    model = nn.Sequential(nn.Embedding(1, 1), nn.Embedding(1, 1), nn.ReLU())
    nothing = r"no linear layer, convolution or attention to convert in: 2 Embedding, 1 Seq"
    with pytest.warns(UserWarning, match=nothing):
        assert convert(model) is model


def test_overrides_by_name(caplog: pytest.LogCaptureFixture) -> None:
    rows = Recipe.parse("fp8-rowwise")
    model = Tied()
    overrides = {"blocks.0.*": "bf16", "*.down": rows, "head": None}
    with caplog.at_level(logging.INFO, logger="mixprec"):
        convert(model, "fp8", overrides=overrides)
    got = {n: m.recipe.name for n, m in model.named_modules() if isinstance(m, Linear)}
    assert got == {
        "blocks.0.up": "bf16",
        "blocks.0.down": "fp8-rowwise",  # the last pattern that matches counts
        "blocks.1.up": "fp8",
        "blocks.1.down": "fp8-rowwise",
    }
    assert type(model.head) is nn.Linear
    assert f"set to bf16 (1); {rows} (2)" in caplog.records[-1].getMessage()


def test_a_pattern_that_matches_nothing_is_told_the_names() -> None:
    model = Tied()
    everything = "'blocks.0.up', 'blocks.0.down', 'blocks.1.up', 'blocks.1.down', 'head'"
    with pytest.raises(ValueError, match=rf"got \['\*.fc2'\]; there are: {everything}"):
        convert(model, overrides={"*.fc2": "bf16", "head": "bf16"})
    with pytest.raises(ValueError, match=r"got \['head'\]; there are: 'blocks.0.up'"):
        convert(model, "fp8", lambda module, fqn: fqn != "head", {"head": "bf16"})
    assert not any(isinstance(m, Linear) for m in model.modules())


def test_the_name_that_torchao_users_know() -> None:
    def only_last(module: nn.Module, fqn: str) -> bool:
        return fqn == "1"

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    convert_to_float8_training(model, module_filter_fn=only_last)
    assert [type(m) for m in model] == [nn.Linear, Linear]
    assert model[1].recipe == Recipe.parse("fp8")
    convert_to_float8_training(model, config="rowwise")
    assert {m.recipe.name for m in model} == {"fp8-rowwise"}


# filters.worthwhile: thresholds, and the reasons it logs


CASES = [  # in, out, per tensor, per row or block
    (4096, 1024, False, False),
    (4097, 1024, True, False),
    (4096, 1025, True, False),
    (1024, 4096, True, False),
    (1025, 4097, True, True),
    (2048, 4096, True, False),
    (2049, 2049, True, True),
    (8192, 2048, True, False),
]


@for_each("k, n, per_tensor, finer", CASES)
def test_thresholds_of_linear_layers_and_1x1_convolutions(
    k: int, n: int, per_tensor: bool, finer: bool
) -> None:
    want = {"bf16": True, "fp16": True, "fp8": per_tensor, "fp8-delayed": per_tensor}
    want |= {"fp8-rowwise": finer, "fp8-block": finer}
    with torch.device("meta"):
        layers = [nn.Conv2d(k, n, 1, padding=p) for p in (0, "same", "valid")]
        layers += [nn.Linear(k, n)]
    for layer in layers:
        assert {recipe: worthwhile(layer, "up", recipe) for recipe in want} == want
        assert worthwhile(layer, "up") == per_tensor


@for_each("options", [{"kernel_size": 3}, {"padding": 1}, {"groups": 2}, {"kernel_size": (1, 3)}])
def test_other_convolutions_save_memory_alone(options: dict[str, int]) -> None:
    layer = nn.Conv2d(8192, 8192, **{"kernel_size": 1} | options, device="meta")
    recipes = ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "bf16", "fp16")
    assert [worthwhile(layer, "stem", recipe) for recipe in recipes] == [False] * 4 + [True] * 2
    assert worthwhile(nn.LayerNorm(4), "norm"), "other modules are none of its business"
