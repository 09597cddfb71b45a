"""Which kinds of layers convert replaces, how they stay what they were, and what it reports."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mixprec
from mixprec.nn import kinds
from mixprec.nn.kinds import coverage
from mixprec.recipes import RECIPES


class Conv1D(nn.Module):
    """In the place of that of transformers: y = x @ weight + bias, weight [K, N]."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n) / 8), nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Conv1D=Conv1D)
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    module = SimpleNamespace(BaseTunerLayer=Adapted)
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", module)


def test_a_class_with_the_name_of_one_of_transformers_is_not_that_class() -> None:
    other = type("Conv1D", (Conv1D,), {"__module__": "transformers.pytorch_utils"})
    assert kinds.converter(other(4, 4)) is None
    assert kinds.converter(Conv1D(4, 4)) is not None


class Named(nn.Linear):
    """A subclass with something of its own, but not a forward pass."""

    def name_of(self) -> str:
        return f"{self.in_features} to {self.out_features}"


class NamedConv(nn.Conv2d):
    pass


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Standardized(nn.Conv2d):
    """As ScaledStdConv2d of timm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return nn.functional.conv2d(x, weight, self.bias, self.stride, padding=self.padding)


class Experts(nn.Module):
    """As those of transformers: stacked weights, and a loop or grouped_mm over them."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.up_proj = nn.Parameter(torch.randn(3, 16, 32) / 8)

    def grouped_form(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.grouped_mm(x, self.up_proj.transpose(1, 2))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if self.grouped:
            return nn.functional.grouped_mm(x, self.up_proj.transpose(1, 2), offs=offs)
        parts = x.tensor_split(offs[:-1].tolist())
        return torch.cat(
            [nn.functional.linear(p, w) for p, w in zip(parts, self.up_proj, strict=True)]
        )


class Packed(nn.Module):
    """A weight that no product of torch is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


LAYERS = {
    "subclass": lambda: Named(32, 16),
    "Conv1D": lambda: Conv1D(16, 32),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(32, 16)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(32, 16)),
    "parametrized subclass": lambda: parametrizations.weight_norm(Named(32, 16)),
}


def grads(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    layer(x).square().sum().backward()
    return [p.grad.clone() for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rowwise", "fp8-delayed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_computes_what_a_plain_linear_with_the_same_weight_does(kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[kind](), torch.randn(4, 8, 32)
    original = type(layer)
    plain = nn.Linear(32, 16)
    with torch.no_grad():
        plain.weight.copy_(layer.weight.t() if kind == "Conv1D" else layer.weight)
        plain.bias.copy_(layer.bias)
    before = {name: id(p) for name, p in layer.named_parameters()}
    layer, plain = mixprec.convert(layer, recipe), mixprec.convert(plain, recipe)
    assert isinstance(layer, mixprec.nn.Layer)
    assert {name: id(p) for name, p in layer.named_parameters()} == before
    if not parametrize.is_parametrized(layer):
        assert isinstance(layer, original)
    assert torch.equal(layer(x), plain(x))
    with mixprec.autocast(enabled=False):
        torch.testing.assert_close(layer(x), plain(x))
    mine, theirs = grads(layer, x), grads(plain, x)
    if kind in ("subclass", "Conv1D"):
        assert torch.equal(mine[0].t() if kind == "Conv1D" else mine[0], theirs[0])
    assert len(mine) == len([*layer.parameters()])


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_and_files_hold_the_same_layer(kind: str) -> None:
    layer, x = mixprec.convert(LAYERS[kind](), "fp8-delayed"), torch.randn(4, 32)
    copies = [copy.deepcopy(layer)]
    if kind == "subclass":  # torch refuses to pickle parametrized layers; Conv1D is not importable
        copies.append(pickle.loads(pickle.dumps(layer)))
        assert copies[1].name_of() == "32 to 16"
    for other in copies:
        assert type(other).__mro__[1:] == type(layer).__mro__[1:]
        assert torch.equal(other(x), layer(x))
        assert other.recipe == layer.recipe


def test_parametrizations_can_be_removed_and_added() -> None:
    layer, x = mixprec.convert(parametrizations.weight_norm(Named(32, 16)), "bf16"), torch.ones(32)
    y = layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer(x), y)
    assert isinstance(layer, (Named, mixprec.nn.Linear))
    parametrizations.weight_norm(layer)
    torch.testing.assert_close(layer(x), y)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_a_forward_pass_of_its_own_keeps_what_it_does_around_the_product(recipe: str) -> None:
    torch.manual_seed(0)
    linear, conv = Twice(32, 16), Standardized(8, 16, 3, padding=1)
    x, image = torch.randn(4, 32), torch.randn(2, 8, 6, 6)
    plain, weight = nn.Linear(32, 16), conv.weight.detach()
    plain.load_state_dict(linear.state_dict())
    same = nn.Conv2d(8, 16, 3, padding=1)
    same.load_state_dict({"weight": (weight - weight.mean()) / weight.std(), "bias": conv.bias})
    twice = mixprec.convert(linear, recipe)
    assert isinstance(twice, Twice)
    assert torch.equal(twice(x), mixprec.convert(plain, recipe)(x) * 2)
    assert torch.equal(mixprec.convert(conv, recipe)(image), mixprec.convert(same, recipe)(image))
    assert len(grads(twice, x)) == 2
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), twice(x))
    with mixprec.autocast(enabled=False):
        assert torch.equal(twice(x), nn.functional.linear(x, plain.weight, plain.bias) * 2)


@pytest.mark.parametrize("grouped", [False, True], ids=["loop", "grouped_mm"])
def test_stacked_experts_are_linear_layers(grouped: bool) -> None:
    torch.manual_seed(0)
    x, offs = torch.randn(12, 32), torch.tensor([5, 5, 12], dtype=torch.int32)
    experts, plain = Experts(grouped), Experts(False)
    plain.load_state_dict(experts.state_dict())
    experts = mixprec.convert(experts, "fp8-rowwise")
    expected = [
        mixprec.functional.linear(part, w, recipe="fp8-rowwise")
        for part, w in zip(x.tensor_split([5, 5]), plain.up_proj, strict=True)
    ]
    y = experts(x, offs)
    assert torch.equal(y, torch.cat(expected))
    y.square().sum().backward()
    torch.cat(expected).square().sum().backward()
    assert torch.equal(experts.up_proj.grad, plain.up_proj.grad)
    assert not experts.up_proj.grad[1].any(), "an expert without a token"
    if grouped:  # of another form, which stays torch's
        batch = torch.randn(3, 4, 32)
        assert torch.equal(experts(batch, None), plain.requires_grad_(False).grouped_form(batch))


def test_the_products_of_a_layer_are_counted_once_and_measured_as_those_of_a_linear() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.conv1d = Twice(32, 32), Conv1D(16, 32)
            self.linear = nn.Linear(32, 16)
            with torch.no_grad():
                self.linear.weight.copy_(self.conv1d.weight.t())
                self.linear.bias.copy_(self.conv1d.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.twice(x)
            return (self.conv1d(y) + self.linear(y)).square().mean()

    data = [torch.randn(8, 32)]
    row = mixprec.compare(Loss, data, ("fp8-rowwise",), lr=0.0, weight_decay=0.0, sqnr=True).rows[0]
    assert row.gemm_counts("twice")["forward"] == {"e4m3 x e4m3": 1}
    assert row.sqnr.keys() == {"conv1d", "linear"}
    assert row.sqnr["conv1d"] == row.sqnr["linear"]


def every_kind() -> nn.Module:
    layers = {name: make() for name, make in LAYERS.items()}
    layers |= {"linear": nn.Linear(32, 16), "twice": Twice(32, 16), "named": Named(32, 16)}
    model = nn.ModuleDict(layers | {"conv": nn.Conv2d(8, 16, 3), "std": Standardized(8, 16, 3)})
    model["experts"], model["attention"] = Experts(False), nn.MultiheadAttention(32, 4)
    model["encoder"] = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1
    )
    model["again"] = model["linear"]
    model["named"].name, model["named"].tag = "mine", object()
    return model


def outputs(model: nn.ModuleDict) -> list[torch.Tensor]:
    x, image = torch.linspace(-1, 1, 128).view(4, 32), torch.linspace(-1, 1, 512).view(1, 8, 8, 8)
    y = [model[name](x) for name in (*LAYERS, "linear", "twice", "named")]
    y += [model[name](image) for name in ("conv", "std")]
    y += [model["experts"](x, torch.tensor([1, 3, 4])), model["attention"](x, x, x)[0]]
    return [*y, model["encoder"](x[None])]


def written(model: nn.Module) -> list[Any]:
    """All that the modules of a model hold. (torch makes a class for each parametrized module.)"""
    held: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        held.append((name, kind.__bases__ if parametrize.is_parametrized(module) else kind))
        held.append(
            [(n, id(t)) for n, t in (*module._parameters.items(), *module._buffers.items())]
        )
        registries = ("_parameters", "_buffers", "_modules")
        held.append({k: v for k, v in vars(module).items() if k not in registries})
    return held


@pytest.mark.parametrize("recipe", RECIPES)
def test_unconvert_leaves_nothing_behind(recipe: str) -> None:
    torch.manual_seed(0)
    model = every_kind().eval()
    model["linear"].train()
    before, keys, expected = written(model), list(model.state_dict()), outputs(model)
    seen: list[nn.Module] = []
    handle = model["linear"].register_forward_hook(lambda module, args, y: seen.append(module))
    mixprec.convert(model, "bf16")
    mixprec.convert(model, dataclasses.replace(RECIPES[recipe], clip_activations=recipe == "fp16"))
    assert (model["named"].name, model["twice"].name) == ("mine", "twice")
    assert not all(map(torch.equal, outputs(model), expected))
    copied = mixprec.unconvert(copy.deepcopy(model))
    assert mixprec.unconvert(model) is model
    seen.clear()
    for other in (model, copied, mixprec.unconvert(copied)):
        assert all(map(torch.equal, outputs(other), expected))
        assert list(other.state_dict()) == keys
    assert seen == [model["linear"], copied["linear"], copied["linear"]]
    handle.remove()
    assert written(model) == before


def test_unconvert_of_a_layer_and_what_it_refuses() -> None:
    layer, x = mixprec.nn.Linear(32, 16, recipe="fp8-delayed"), torch.ones(4, 32)
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager")
    compiled(x)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert mixprec.unconvert(layer) is layer
    assert type(layer) is nn.Linear
    assert torch.equal(compiled(x), plain)

    class Own(mixprec.nn.Linear):
        pass

    wrapped = mixprec.convert(nn.Linear(2, 2), "bf16")
    wrapped.forward = wrapped.forward
    for wrong, match in ((Own(2, 2), "1 is a Own, a class derived"), (wrapped, "1 has its own fo")):
        model = nn.Sequential(mixprec.nn.Linear(2, 2), wrong)
        with pytest.raises(ValueError, match=f"^unconvert: {match}"):
            mixprec.unconvert(model)
        assert type(model[0]) is mixprec.nn.Linear
    with pytest.raises(TypeError, match=r"^unconvert: model must be a torch.nn.Module, got list"):
        mixprec.unconvert([])


def test_complex_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 16))
    mixprec.convert(model, "bf16")
    assert [type(m) for m in model] == [nn.Linear, mixprec.nn.Linear]


def test_a_name_that_the_user_took() -> None:
    """timm's ScaledStdConv2d has a `scale`, which delayed recipes have too."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 16)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias) * self.scale

    model, x = nn.Sequential(Scaled(), nn.Linear(16, 16)), torch.ones(1, 32)
    state, expected = model.state_dict(), model(x)
    for _ in range(2):  # the second time, of a layer that is converted already
        with pytest.raises(ValueError, match="convert: 0 has an attribute 'scale' of its own, and"):
            mixprec.convert(model, "fp8-delayed")
        assert not any("1.scale" in name for name in model.state_dict())
        torch.testing.assert_close(mixprec.convert(model, "bf16")(x), expected, rtol=2e-2, atol=0.1)
    model.load_state_dict(state)
    assert torch.equal(mixprec.unconvert(model)(x), expected)


class Adapted(nn.Module):
    """In the place of peft's: as it wraps a layer: y = base_layer(x) + B(A(x))."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64, bias=False)})


def messages(caplog: pytest.LogCaptureFixture, model: nn.Module, **options: Any) -> str:
    with caplog.at_level(logging.INFO, "mixprec"):
        mixprec.convert(model, "bf16", **options)
    return caplog.messages[-1]


def test_adapters_of_peft_are_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Adapted())
    assert messages(caplog, model).endswith(
        "80% of the weights; left out: Linear 20.0% (an adapter of peft)"
    )
    found = {name: isinstance(m, mixprec.nn.Layer) for name, m in model[0].named_modules()}
    assert [name for name, converted in found.items() if converted] == ["base_layer"]
    del sys.modules["peft.tuners.tuners_utils"]  # then it is a class that only looks like peft's
    assert messages(caplog, nn.Sequential(Adapted())).endswith("100% of the weights")


def test_a_warning_names_what_cannot_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Packed())
    with pytest.warns(
        UserWarning, match=r"33% of the weights; left out: Packed 66.7% \(there is no su"
    ):
        messages(caplog, model)


def test_what_the_caller_excludes_is_reported_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 96))
    text = messages(caplog, model, overrides={"1": None})
    assert text.endswith(
        "1 of 2 layers set to bf16: 25% of the weights; left out: Linear 75.0% (excluded)"
    )


def test_embeddings_count_where_a_layer_shares_them() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    assert coverage(model).total == 2048
    model["head"].weight = model["wte"].weight
    mixprec.convert(model, "bf16")
    found = coverage(model)
    assert (found.converted, found.total, found.unsupported) == (2048, 2048, 0)
