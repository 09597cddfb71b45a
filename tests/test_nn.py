"""mixprec.nn.Linear: an nn.Linear in everything but the arithmetic."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from cases import WIDE, name, normal

from mixprec import functional
from mixprec.nn import Linear
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import sqnr

NAMES = tuple(RECIPES)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_computes_functional_linear(dtype: torch.dtype, recipe: str) -> None:
    layer = Linear(16, 8, dtype=dtype, recipe=recipe)
    assert isinstance(layer, torch.nn.Linear)
    for x_dtype in WIDE:
        x = normal((2, 3, 16), x_dtype)
        y = layer(x)
        assert y.dtype == x_dtype
        assert torch.equal(y, functional.linear(x, layer.weight, layer.bias, recipe=recipe))
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
    assert repr(Linear(16, 8)) == (
        "Linear(in_features=16, out_features=8, bias=True, fp8: x e4m3, w e4m3, g e5m2)"
    )
    assert repr(Linear(4, 2, bias=False, recipe="bf16")) == (
        "Linear(in_features=4, out_features=2, bias=False, bf16)"
    )


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
