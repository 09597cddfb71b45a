"""convert and cast_parameters: what changes in a model, and everything that must not."""

from __future__ import annotations

import logging

import pytest
import torch
from cases import for_each, normal
from torch import nn

from mixprec.nn import Conv2d, Linear
from mixprec.nn.convert import NORMS, cast_parameters, convert, convert_to_float8_training
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import SAVED

NAMES = tuple(RECIPES)


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
    return [
        (fqn, id(p), p.dtype, p.requires_grad)
        for fqn, p in model.named_parameters(remove_duplicate=False)
    ]


@for_each("recipe", [*NAMES, Recipe("own", "e4m3", "e4m3", "e4m3")])
def test_every_linear_is_replaced_and_no_parameter_touched(recipe: str | Recipe) -> None:
    model = Tied()
    model.blocks[1].up.weight.requires_grad_(False)
    before, keys = snapshot(model), list(model.state_dict())
    assert convert(model, recipe) is model
    assert snapshot(model) == before
    assert [key for key in model.state_dict() if not key.endswith(SAVED)] == keys
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
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("convert")]
    fp8 = "fp8: x e4m3/tensor, w e4m3/tensor, g e5m2/tensor"
    assert [line.partition(": 49% of")[0] for line in lines] == [
        f"convert: 1 of 3 layers set to {fp8}"
    ]
    convert(Block(), "fp8", every, {"up": "bf16"})
    assert recipes == {"up": "bf16", "down": "fp8"}


def test_a_root_that_is_a_layer_is_returned_converted() -> None:
    linear = nn.Linear(4, 4)
    got = convert(linear, "bf16")
    assert type(got) is Linear
    assert (got.name, got.weight) == ("", linear.weight)
    assert convert(got, "fp8") is got
    assert convert(linear, "fp8", lambda module, fqn: fqn != "") is linear
    assert convert(linear, overrides={"": "bf16"}).recipe.name == "bf16"
    assert type(convert(nn.Conv2d(1, 1, 1), "fp16")) is Conv2d


def test_converting_again_sets_the_new_recipe(caplog: pytest.LogCaptureFixture) -> None:
    model = convert(Block(), "fp8-delayed")
    up = model.up
    up.scale.fill_(8.0)
    with caplog.at_level(logging.INFO, logger="mixprec"):
        convert(model, "fp8-delayed")
    assert caplog.records[-1].getMessage().endswith("(2 had it already): 100% of the weights")
    assert up.scale.tolist() == [8.0] * 2, "twice the same changes nothing"
    convert(model, "bf16", lambda module, fqn: fqn == "up")
    assert model.up is up
    assert (model.up.recipe.name, model.down.recipe.name) == ("bf16", "fp8-delayed")


def test_a_subclass_of_ours_gets_the_recipe() -> None:
    class OwnOfOurs(Linear):
        pass

    own = OwnOfOurs(4, 4, recipe="bf16")
    assert convert(own, "fp8") is own
    assert own.recipe.name == "fp8"


def test_the_training_flag_and_the_meta_device_survive() -> None:
    with torch.device("meta"):
        model = Block()
    model.up.eval()
    convert(model, "fp8")
    assert (model.up.training, model.down.training) == (False, True)
    assert model(torch.empty(3, 16, device="meta")).device.type == "meta"
    assert all(p.is_meta for p in model.parameters())


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
    with pytest.raises(TypeError, match=r"convert: model must be a torch.nn.Module, got list"):
        convert([nn.Linear(4, 4)], "fp8")


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


def test_convolutions_are_converted_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 4)})
    weights = snapshot(model)
    with caplog.at_level(logging.INFO, logger="mixprec"):
        convert(model, "fp8-rowwise", overrides={"stem": "bf16"})
    assert [type(m) for m in model.values()] == [Conv2d, Linear]
    assert (model["stem"].recipe.name, model["head"].recipe.name) == ("bf16", "fp8-rowwise")
    assert caplog.records[-1].getMessage().startswith("convert: 2 of 2 layers set to bf16 (1); ")
    assert snapshot(model) == weights
    stem = model["stem"]
    convert(model, "fp8-delayed")
    assert model["stem"] is stem
    assert (stem.recipe.name, stem.name, stem.scale.tolist()) == ("fp8-delayed", "stem", [0.0] * 2)


def test_a_model_without_layers_to_convert() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1), nn.ReLU())
    nothing = r"no nn.Linear or nn.Conv2d to convert in: 2 Conv1d, 1 Sequential, 1"
    with pytest.warns(UserWarning, match=nothing):
        assert convert(model) is model


def test_the_name_that_torchao_users_know() -> None:
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        module_filter_fn=lambda module, fqn: fqn == "1",
    )
    assert [type(m) for m in model] == [nn.Linear, Linear]
    assert model[1].recipe == Recipe.parse("fp8")
    convert_to_float8_training(model, config="rowwise")
    assert {m.recipe.name for m in model} == {"fp8-rowwise"}
    with pytest.raises(ValueError, match='recipe must be "bf16"'):
        convert_to_float8_training(model, config=object())


# --- cast_parameters -------------------------------------------------------------------------


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_cast_and_norms_stay(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4), nn.LayerNorm(4)
    )
    model.register_buffer("table", torch.ones(3))
    model[3].weight.requires_grad_(False)
    ids = [id(p) for p in model.parameters()]
    want = {fqn: p.detach().to(dtype) for fqn, p in model.named_parameters()}
    assert cast_parameters(model, dtype) is model
    assert [id(p) for p in model.parameters()] == ids
    for fqn, p in model.named_parameters():
        if fqn[0] in "14":
            assert p.dtype == torch.float32, fqn
        else:
            assert torch.equal(p, want[fqn]), fqn
    assert not model[3].weight.requires_grad
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64}
    y = model(normal((2, 3, 4, 4), dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert model[1].weight.grad.dtype == torch.float32


def norms() -> list[tuple[nn.Module, tuple[int, ...]]]:
    tracked = nn.InstanceNorm3d(8, affine=True, track_running_stats=True)
    return [
        *((norm(8), (4, 8)) for norm in (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)),
        (nn.GroupNorm(2, 8), (4, 8, 3)),
        (nn.BatchNorm2d(8), (4, 8, 3, 3)),
        (nn.BatchNorm3d(8), (4, 8, 2, 3, 3)),
        (nn.InstanceNorm1d(8, affine=True), (4, 8, 5)),
        (nn.InstanceNorm2d(8, affine=True), (4, 8, 3, 3)),
        (tracked, (4, 8, 2, 3, 3)),
    ]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("case", range(len(norms())))
def test_norms_with_fp32_parameters_take_16_bit_input(case: int, dtype: torch.dtype) -> None:
    """What cast_parameters relies on: torch computes in FP32 inside, forward and backward."""
    norm, shape = norms()[case]
    assert isinstance(norm, NORMS)
    cast_parameters(norm, dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 2.0**-10 * torch.arange(8))  # not representable in bf16
    x = normal(shape, dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    y, y_wide = norm(x), norm(wide)
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), y_wide, rtol=eps, atol=eps)
    g = normal(shape, dtype, seed=1)
    y.backward(g)
    grad_weight, norm.weight.grad = norm.weight.grad, None
    y_wide.backward(g.float())
    assert (x.grad.dtype, grad_weight.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=2 * eps, atol=4 * eps)
    torch.testing.assert_close(grad_weight, norm.weight.grad, rtol=4 * eps, atol=8 * eps)


def test_casting_keeps_ties_gradients_and_goes_back() -> None:
    model = convert(Tied(), "fp8")
    model(torch.arange(10)).sum().backward()
    grad = model.head.weight.grad.clone()
    cast_parameters(model, torch.bfloat16)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == torch.bfloat16
    assert torch.equal(model.head.weight.grad, grad.bfloat16())
    assert model(torch.arange(10)).dtype == torch.bfloat16
    cast_parameters(model, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    integers = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int8), False)])
    assert cast_parameters(integers, torch.bfloat16)[0].dtype == torch.int8


def test_a_16_bit_norm_becomes_fp32_and_meta_stays_meta() -> None:
    model = cast_parameters(Block().bfloat16(), torch.bfloat16)
    assert (model.norm.weight.dtype, model.up.weight.dtype) == (torch.float32, torch.bfloat16)
    with torch.device("meta"):
        model = cast_parameters(Block(), torch.float16)
    assert model.up.weight.is_meta
    assert model.up.weight.dtype == torch.float16


def test_cast_parameters_errors() -> None:
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32, got"):
        cast_parameters(nn.Linear(2, 2), torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"cast_parameters: model must be a torch.nn.Module"):
        cast_parameters(torch.zeros(2), torch.bfloat16)
