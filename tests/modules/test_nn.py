"""mixprec.nn.Linear: an nn.Linear in everything but the arithmetic."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from cases import WIDE, for_each, normal

import mixprec
from mixprec import functional
from mixprec.functional.operands import Delayed
from mixprec.nn import Linear, _loss_scaling
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import sqnr

NAMES = tuple(RECIPES)


@for_each("recipe", NAMES)
@for_each("dtype", WIDE)
def test_computes_functional_linear(dtype: torch.dtype, recipe: str) -> None:
    layer = Linear(16, 8, dtype=dtype, recipe=recipe)
    assert isinstance(layer, torch.nn.Linear)
    for x_dtype in WIDE:
        x = normal((2, 3, 16), x_dtype)
        y = layer(x)
        assert y.dtype == x_dtype
        state = (
            Delayed(torch.zeros(3), torch.zeros(2), torch.zeros(()))
            if layer.recipe.is_delayed
            else None
        )
        want = functional.linear(x, layer.weight, layer.bias, recipe=recipe, delayed=state)
        assert torch.equal(y, want)
    layer(x).sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


def test_under_autocast_the_output_has_the_autocast_dtype() -> None:
    layer = Linear(16, 8)
    x = normal((3, 16), torch.float32).requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            y = layer(x)
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == torch.float32
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_repr_says_everything() -> None:
    tensors = "x e4m3/tensor, w e4m3/tensor, g e5m2/tensor"
    assert repr(Linear(16, 8)) == f"Linear(in=16, out=8, fp8: {tensors})"
    assert repr(Linear(4, 2, bias=False, recipe="bf16")) == "Linear(in=4, out=2, bias=False, bf16)"
    delayed = repr(Linear(16, 8, recipe="fp8-delayed"))
    assert delayed == f"Linear(in=16, out=8, fp8-delayed: {tensors}, delayed(16,max))"


def test_state_dict_is_that_of_nn_linear() -> None:
    plain, ours = torch.nn.Linear(16, 8), Linear(16, 8)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    ours.load_state_dict(plain.state_dict())
    assert torch.equal(ours.weight, plain.weight)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    again = torch.nn.Linear(16, 8)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.weight, ours.weight)


def test_same_initialisation_as_nn_linear() -> None:
    torch.manual_seed(1)
    plain = torch.nn.Linear(16, 8)
    torch.manual_seed(1)
    assert torch.equal(Linear(16, 8).weight, plain.weight)


def test_copies_and_pickles() -> None:
    layer = Linear(16, 8, recipe="bf16", name="head")
    x = normal((3, 16), torch.float32)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert (other.recipe, other.name) == (layer.recipe, "head")
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_from_linear_shares_parameters_hooks_and_attributes() -> None:
    linear = torch.nn.Linear(16, 8).eval()
    linear.bias.requires_grad_(False)
    linear.tag = "mine"
    calls: list[str] = []
    handle = linear.register_forward_hook(lambda *_: calls.append("forward"))
    layer = Linear.from_linear(linear, "fp16", name="head")
    assert type(layer) is Linear
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert (layer.tag, layer.name, layer.recipe) == ("mine", "head", Recipe.parse("fp16"))
    layer(torch.zeros(1, 16))
    handle.remove()
    layer(torch.zeros(1, 16))
    assert calls == ["forward"]
    layer.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    assert not hasattr(linear, "extra")


def test_from_linear_refuses_what_it_would_lose() -> None:
    linear = torch.nn.Linear(4, 4)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"head has its own forward: convert it before"):
        Linear.from_linear(linear, "fp8", name="head")
    compiled = torch.nn.Linear(4, 4)
    compiled.compile()
    with pytest.raises(ValueError, match="_compiled_call_impl"):
        Linear.from_linear(compiled, "fp8")
    with pytest.raises(TypeError, match=r"linear must be a torch.nn.Linear, got Conv2d"):
        Linear.from_linear(torch.nn.Conv2d(1, 1, 1), "fp8")
    with pytest.raises(ValueError, match='recipe must be "bf16"'):
        Linear(4, 4, recipe="fp4")


def test_on_the_meta_device() -> None:
    layer = Linear(16, 8, device="meta")
    y = layer(torch.empty(2, 3, 16, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 8), torch.bfloat16, "meta")
    y.sum().backward()
    assert layer.weight.grad.shape == (8, 16)


def test_observed_reports_the_name() -> None:
    layer = Linear(4, 4, name="decoder.out")
    seen: list[str] = []
    with functional.observed(lambda kind, name, a, b: seen.append(f"{kind} {name} {a} {b}")):
        layer(torch.ones(2, 4)).sum().backward()
    assert seen == ["forward decoder.out e4m3 e4m3", "grad_weight decoder.out e5m2 e4m3"]


@pytest.mark.parametrize("recipe", NAMES)
def test_trains_like_fp32(recipe: str) -> None:
    """200 steps end as low as in FP32, within 3 % of the loss at the start (FP8 noise: 1.5 %)."""
    x = normal((256, 16), torch.float32)
    target = torch.sin(x @ normal((16, 4), torch.float32, seed=1) / 4)

    def train(make: object) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(make(16, 64), torch.nn.GELU(), make(64, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        return loss.item()

    want = train(torch.nn.Linear)
    got = train(lambda i, o: Linear(i, o, recipe=recipe))
    start = target.square().mean().item()
    assert want < 0.05 * start
    assert got < want + 0.03 * start, (got, want, start)


def test_compiles_as_a_module() -> None:
    layer = Linear(16, 8)
    x = normal((3, 16), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    assert torch.equal(y, layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    y.sum().backward()
    assert sqnr(x.sum(0).expand(8, 16), layer.weight.grad) >= 17


def test_setting_the_recipe_brings_and_drops_the_scales() -> None:
    layer = Linear(16, 8)
    for recipe, keys in (
        ("fp8-delayed", ["weight", "bias", "amax_history", "scale"]),
        ("fp8-rowwise", ["weight", "bias"]),
        ("fp8-delayed", ["weight", "bias", "amax_history", "scale"]),
    ):
        layer.recipe = recipe
        assert layer.recipe is RECIPES[recipe]
        assert list(layer.state_dict()) == keys
    layer.scale.fill_(2.0)
    layer.recipe = RECIPES["fp8-delayed"]  # the one it has
    assert layer.scale.tolist() == [2.0] * 2
    with pytest.raises(ValueError, match='recipe must be "bf16"'):
        layer.recipe = "fp4"
    assert layer.recipe is RECIPES["fp8-delayed"]


def test_fp16_without_a_scaler_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loss_scaling, "_warned", False)
    layers = {recipe: Linear(4, 4, recipe=recipe) for recipe in ("bf16", "fp16")}
    x = torch.ones(2, 4)

    def step(recipe: str, scaler: mixprec.GradScaler | None) -> None:
        optimizer = mixprec.optim.AdamW(layers[recipe].parameters())
        loss = layers[recipe](x).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step("bf16", None)
        step("fp16", mixprec.GradScaler())
    with pytest.warns(UserWarning, match="fp16 recipe is being trained without loss scaling"):
        step("fp16", mixprec.GradScaler(enabled=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step("fp16", None)


def test_inside_a_region_with_another_recipe() -> None:
    layer, x = Linear(16, 8, recipe="fp8-delayed"), normal((3, 16), torch.float32)
    with mixprec.autocast("bf16"):
        y = layer(x)
    want = functional.linear(x, layer.weight, layer.bias, recipe="bf16")
    assert torch.equal(y, want)
    with mixprec.autocast(enabled=False):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert layer.amax == -1.0, "its own scales have not been used"
    with mixprec.autocast():
        layer(x)
    assert layer.amax > 0
    with mixprec.reuse_weights(layer), mixprec.autocast("bf16"):
        assert torch.equal(layer(x), want)


@for_each("shape", [(16,), (3, 16), (2, 3, 16)])
@for_each("recipe", NAMES)
def test_the_output_may_be_written_to(recipe: str, shape: tuple[int, ...]) -> None:
    x, results = normal(shape, torch.float32), []
    for inplace in (False, True):
        torch.manual_seed(0)
        layer = Linear(16, 8, recipe=recipe)
        y = torch.nn.functional.relu(layer(x), inplace=inplace)
        y.sum().backward()
        results.append([y.detach(), layer.weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
