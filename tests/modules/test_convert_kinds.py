"""Which kinds of layers convert replaces, how they stay what they were, and what it reports."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import for_each
from layer_cases import Adapted, Own, Twice
from models import Model
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint

import mixprec
from mixprec.nn import kinds
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr


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


def test_what_convert_leaves() -> None:
    other = type("Conv1D", (Conv1D,), {"__module__": "transformers.pytorch_utils"})
    assert kinds.layer_for(Conv1D(4, 4)) is not None
    for module in (other(4, 4), nn.Linear(2, 2, dtype=torch.complex64), nn.Bilinear(2, 2, 2)):
        assert kinds.layer_for(module) is None


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


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "subclass": lambda: Own(32, 16),
    "Conv1D": lambda: Conv1D(16, 32),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(32, 16)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(32, 16)),
    "parametrized subclass": lambda: parametrizations.weight_norm(Own(32, 16)),
}
OWN_FORWARD: dict[str, Callable[[], nn.Module]] = {
    "twice": lambda: Twice(32, 16),
    "standardized": lambda: Standardized(8, 16, 3, padding=1),
}


def input_of(layer: nn.Module) -> torch.Tensor:
    return torch.randn(2, 8, 6, 6) if isinstance(layer, nn.Conv2d) else torch.randn(4, 8, 32)


def plain_of(layer: nn.Module) -> nn.Module:
    """The layer of torch that multiplies with the same weight."""
    weight, plain = layer.weight.detach(), nn.Linear(32, 16)
    if isinstance(layer, Conv1D):
        weight = weight.t()
    if isinstance(layer, Standardized):
        weight, plain = (weight - weight.mean()) / weight.std(), nn.Conv2d(8, 16, 3, padding=1)
    plain.load_state_dict({"weight": weight, "bias": layer.bias})
    return plain


def grads(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rowwise", "fp8-delayed"])
@pytest.mark.parametrize("kind", [*LAYERS, *OWN_FORWARD])
def test_computes_what_a_plain_layer_with_the_same_weight_does(kind: str, recipe: str) -> None:
    layer = (LAYERS | OWN_FORWARD)[kind]()
    original, x = type(layer), input_of(layer)
    times = 2 if kind == "twice" else 1
    before = {name: id(p) for name, p in layer.named_parameters()}
    plain = mixprec.convert(plain_of(layer), recipe)
    layer = mixprec.convert(layer, recipe)
    assert isinstance(layer, mixprec.nn.Layer)
    assert {name: id(p) for name, p in layer.named_parameters()} == before
    if not parametrize.is_parametrized(layer):
        assert isinstance(layer, original)
    assert torch.equal(layer(x), times * plain(x))
    with mixprec.autocast(enabled=False):
        torch.testing.assert_close(layer(x), times * plain(x))
    mine, theirs = grads(layer, x), grads(plain, x)
    if kind in ("subclass", "Conv1D"):
        assert torch.equal(mine[0].t() if kind == "Conv1D" else mine[0], theirs[0])
    others = [copy.deepcopy(layer)]
    if kind in ("subclass", "twice"):  # torch refuses to pickle parametrized layers
        others.append(pickle.loads(pickle.dumps(layer)))
        assert isinstance(others[1], original)
        whole = kind == "subclass"  # one with a forward pass of its own is not traced
        others.append(torch.compile(layer, backend="aot_eager", fullgraph=whole))
    for same in others:
        assert same.recipe == layer.recipe
        assert torch.equal(same(x), layer(x))


class WithDeepcopy(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> WithDeepcopy:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        made.mine = True
        return made


class WithGetstate(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "generator"}


COPIED = {**LAYERS, **{c.__name__: lambda c=c: c(32, 16) for c in (WithDeepcopy, WithGetstate)}}


@pytest.mark.parametrize("kind", COPIED)
def test_copies_have_scales_that_are_updated(kind: str) -> None:
    layer, x = mixprec.convert(COPIED[kind](), "fp8-delayed"), torch.randn(4, 32)
    if kind == "WithGetstate":
        layer.generator = (i for i in range(3))  # cannot be copied
    copied = copy.deepcopy(layer)
    for same in (layer, copied):
        same(x).sum().backward()
        mixprec.update_scales(same)
    assert layer.scale.all()
    assert torch.equal(copied.scale, layer.scale)
    assert hasattr(copied, "mine") == (kind == "WithDeepcopy")


@pytest.mark.parametrize("grouped", [False, True], ids=["loop", "grouped_mm"])
def test_stacked_experts_are_linear_layers(grouped: bool) -> None:
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
    assert torch.equal(torch.compile(experts, backend="aot_eager")(x, offs), y)
    y.square().sum().backward()
    torch.cat(expected).square().sum().backward()
    assert torch.equal(experts.up_proj.grad, plain.up_proj.grad)
    assert not experts.up_proj.grad[1].any(), "an expert without a token"
    if grouped:  # of another form, which stays torch's
        batch = torch.randn(3, 4, 32)
        assert torch.equal(experts(batch, None), plain.requires_grad_(False).grouped_form(batch))


OPERATORS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "@": lambda self, x: x @ self.weight.T + self.bias,
    "matmul": lambda self, x: torch.matmul(x, other=self.weight.t()) + self.bias,
    "mm": lambda self, x: x.mm(self.weight.transpose(0, 1)) + self.bias,
    "addmm": lambda self, x: torch.addmm(self.bias, x, self.weight.T),
    "from the left": lambda self, x: (self.weight @ x.T).T + self.bias,
    "in parts": lambda self, x: torch.cat([x @ w.T for w in self.weight.split(4)], 1) + self.bias,
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by", OPERATORS)
def test_matrix_products_with_a_weight_are_those_of_a_linear_layer(by: str, mode: Any) -> None:
    kind = type("Multiplies", (nn.Linear,), {"forward": OPERATORS[by]})
    layer, x = kind(32, 16), torch.randn(6, 32, requires_grad=True)
    plain = nn.Linear(32, 16)
    plain.load_state_dict(layer.state_dict())
    for each in (layer, plain):
        mixprec.convert(each, "fp8-rowwise")
    compiled = torch.compile(layer, backend="aot_eager")
    with mode():
        found = [compiled(x), layer(x), compiled(x)]
        assert all(torch.equal(y, plain(x)) for y in found)
    assert torch.equal(grads(layer, x)[0], grads(plain, x)[0])
    assert torch.equal(grads(compiled, x)[0], grads(plain, x)[0])


STACKED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bmm": lambda self, x: torch.bmm(x, self.up_proj.mT),
    "@": lambda self, x: x @ self.up_proj.transpose(1, 2),
    "from the left": lambda self, x: (self.up_proj @ x.mT).mT,
    "baddbmm": lambda self, x: torch.baddbmm(x.new_zeros(()), x, self.up_proj.mT),
    "one by one": lambda self, x: torch.stack([r @ w.T for r, w in zip(x, self.up_proj)]),  # noqa: B905
}


@pytest.mark.parametrize("by", STACKED)
def test_products_with_stacked_weights(by: str) -> None:
    kind = type("Multiplies", (Experts,), {"forward": STACKED[by]})
    experts, x = kind(False), torch.randn(3, 5, 32)
    weight = experts.up_proj.detach().clone().requires_grad_()
    want = torch.stack(
        [mixprec.functional.linear(r, w, recipe="fp8-rowwise") for r, w in zip(x, weight)]  # noqa: B905
    )
    y = mixprec.convert(experts, "fp8-rowwise")(x)
    assert torch.equal(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(experts.up_proj.grad, weight.grad)
    with torch.no_grad():
        assert torch.equal(torch.compile(experts, backend="aot_eager")(x), want)


class Weighted(nn.Module):
    """A module with a stacked parameter, and a `weight`, a `name` and a `clipped` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.weight = nn.Parameter(torch.randn(3, 32, 16)), 0.5
        self.register_buffer("clipped", torch.zeros(2))
        self.register_buffer("name", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x @ self.w) * self.name


@for_each("shape", [(5, 32), (3, 5, 32), (2, 1, 5, 32), (2, 3, 0, 32), (32,)])
def test_broadcasts_and_attributes_of_the_module(shape: tuple[int, ...]) -> None:
    module, x = Weighted(), torch.randn(shape)
    want = module(x)
    y = mixprec.convert(module, "bf16")(x)
    assert y.shape == want.shape
    assert not y.numel() or 40 < sqnr(want, y) < 70
    assert (module.weight, module.name.item()) == (0.5, 1.0)


class Reversed(torch.autograd.Function):
    """The weight itself, with a gradient that is not that of a view."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return -2 * g


def without_grad(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight = self.weight.T
    return x @ weight


VIEWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a Function": lambda self, x: x @ Reversed.apply(self.weight).T,
    "no gradient": without_grad,
    "in parts": lambda self, x: torch.cat([x @ w.T for w in self.weight.split(4)], 1),
    "computed": lambda self, x: nn.functional.linear(x, 2 * self.weight),
    "of another dtype": lambda self, x: (x.double() @ self.weight.double().T).float(),
    "sparse": lambda self, x: x.to_sparse() @ self.weight.T,
    "beta": lambda self, x: torch.addmm(self.bias, x, self.weight.T, beta=0.5, alpha=3),
    "from the left": lambda self, x: (self.weight @ x.T).view(4, -1),
}


@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("by", VIEWS)
@pytest.mark.filterwarnings("ignore:.*does not use the recipe")
def test_gradients_are_those_of_what_is_multiplied(by: str, has_main_grad: bool) -> None:
    """Also where the weight has a main_grad, to which all of them are added."""
    layer = type("Multiplies", (nn.Linear,), {"forward": VIEWS[by]})(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    want = layer(x)
    want.sin().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    mixprec.convert(layer, "bf16")
    if has_main_grad:
        layer.weight.main_grad = torch.zeros(16, 32)
    y = layer(x)
    y.sin().sum().backward()
    assert sqnr(want, y) > 35
    got = layer.weight.main_grad if has_main_grad else layer.weight.grad
    if expected is None:
        assert got is None or not got.any()
    else:
        assert sqnr(expected, got) > 30
    assert not has_main_grad or layer.weight.grad is None


def test_a_main_grad_outside_of_the_recipe() -> None:
    for make in (nn.Linear, lambda k, n: parametrizations.weight_norm(nn.Linear(k, n))):
        layer = mixprec.convert(make(8, 8), "bf16")
        for p in layer.parameters():
            p.main_grad = torch.zeros_like(p)
        for inside in (True, False):
            with mixprec.autocast(enabled=inside):
                layer(torch.randn(4, 8)).square().sum().backward()
        assert all(p.grad is None and p.main_grad.any() for p in layer.parameters())


@pytest.mark.parametrize("transform", ["compile", "export", "vjp", "vmap"])
def test_a_matrix_product_in_a_transform_uses_the_recipe(transform: str) -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                return nn.functional.linear(x, self.weight)
            return x @ self.weight.T

    layer, x = Branches(32, 16), torch.randn(4, 32)
    want = x @ layer.weight.T
    mixprec.convert(layer, "fp8")(x)
    if transform == "compile":
        compiled = torch.compile(layer, backend="aot_eager")
        compiled(x)
    layer.eval()
    if transform == "compile":
        y = compiled(x)
    elif transform == "export":
        y = torch.export.export(layer, (x,), strict=False).module()(x)
    elif transform == "vjp":
        y, _ = torch.func.vjp(layer, x)
    else:
        weights = {"weight": layer.weight.detach().expand(3, -1, -1)}
        call = functools.partial(torch.func.functional_call, layer)
        y = torch.func.vmap(lambda w: call(w, (x,)))(weights)[0]
    assert 20 < sqnr(want, y) < 40


class Recomputed(Experts):
    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        part = super().forward
        return checkpoint(lambda x: part(x, offs).square(), x, use_reentrant=self.reentrant)


class TwiceRecomputed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = functools.partial(nn.functional.linear, weight=self.weight)
        return nn.functional.linear(x, self.weight) + checkpoint(again, x, use_reentrant=False)


def test_a_compiled_piece_of_a_forward_pass_is_not_computed_by_torch() -> None:
    layer, x = mixprec.convert(TwiceRecomputed(32, 16), "fp8"), torch.randn(4, 32)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("grouped", [False, True], ids=["loop", "grouped_mm"])
def test_a_checkpointed_piece_of_a_forward_pass_is_not_computed_by_torch(grouped: bool) -> None:
    """A checkpoint of the whole module is right (test_grouped_linear.py)."""
    x, offs = torch.randn(12, 32, requires_grad=True), torch.tensor([5, 5, 12], dtype=torch.int32)
    experts = mixprec.convert(Recomputed(grouped), "fp8-rowwise")
    experts.reentrant = True
    with pytest.raises(RuntimeError, match="without the recipe fp8-rowwise: put it around"):
        experts(x, offs)
    with torch.no_grad():  # nothing is computed again
        assert experts(x, offs).isfinite().all()
    experts.reentrant = False  # torch compares what is saved
    with pytest.raises(CheckpointError):
        experts(x, offs).sum().backward()


def test_the_products_of_a_layer_are_counted_once_and_measured_as_those_of_a_linear() -> None:
    for recipe in ("fp8-rowwise", "fp8-delayed"):
        model = mixprec.convert(loss_of_layers(), recipe)
        ops = mixprec.audit(model, torch.randn(8, 32), sqnr=True).ops
        for name in ("twice", "encoder.self_attn"):
            mine = (op for op in ops if (op.module, op.phase) == (name, "forward"))
            assert [op.calls for op in mine if op.decided == f"recipe {recipe}"] == [1]
        products = [op for op in ops if op.kind == "product"]
        ours, linear = (
            {p: lost.own for op in products if op.module == name for p, lost in op.lost.items()}
            for name in ("conv1d", "linear")
        )
        assert ours.keys() == {"y", "grad_input", "grad_weight"}
        assert ours == pytest.approx(linear, abs=1e-4)  # FP32 sums in other orders


def every_kind() -> nn.Module:
    layers = {name: make() for name, make in (LAYERS | OWN_FORWARD).items()}
    model = nn.ModuleDict(layers | {"linear": nn.Linear(32, 16), "conv": nn.Conv2d(8, 16, 3)})
    model["experts"], model["attention"] = Experts(False), nn.MultiheadAttention(32, 4)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model["encoder"] = nn.TransformerEncoder(encoder, 1)
    model["again"] = model["linear"]
    model["subclass"].name, model["subclass"].tag = "mine", object()
    return model


def outputs(model: nn.ModuleDict) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 32)
    names = (*LAYERS, *OWN_FORWARD, "linear", "conv")
    y = [model[name](input_of(model[name])) for name in names]
    y += [model["experts"](x, torch.tensor([1, 3, 4])), model["attention"](x, x, x)[0]]
    return [*y, model["encoder"](x[None])]


def written(model: nn.Module) -> list[Any]:
    """All that the modules of a model hold. (torch makes a class for each parametrized module.)"""
    held: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        held.append((name, kind.__bases__ if parametrize.is_parametrized(module) else kind))
        tensors = module._parameters | module._buffers
        held.append([(n, id(t)) for n, t in tensors.items()])
        registries = ("_parameters", "_buffers", "_modules")
        held.append({k: v for k, v in vars(module).items() if k not in registries})
    return held


@pytest.mark.parametrize("recipe", RECIPES)
def test_unconvert_leaves_nothing_behind(recipe: str) -> None:
    model = every_kind().eval()
    model["linear"].train()
    before, keys, expected = written(model), list(model.state_dict()), outputs(model)
    seen: list[nn.Module] = []
    handle = model["linear"].register_forward_hook(lambda module, args, y: seen.append(module))
    mixprec.convert(model, "bf16")
    mixprec.convert(model, dataclasses.replace(RECIPES[recipe], clip_activations=recipe == "fp16"))
    assert (model["subclass"].name, model["twice"].name) == ("mine", "twice")
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

    class Derived(mixprec.nn.Linear):
        pass

    wrapped = mixprec.convert(nn.Linear(2, 2), "bf16")
    wrapped.forward = wrapped.forward
    for wrong, match in (
        (Derived(2, 2), "1 is a Derived, a class derived"),
        (wrapped, "1 has its own fo"),
    ):
        model = nn.Sequential(mixprec.nn.Linear(2, 2), wrong)
        with pytest.raises(ValueError, match=f"^unconvert: {match}"):
            mixprec.unconvert(model)
        assert type(model[0]) is mixprec.nn.Linear


def test_a_name_that_the_user_took() -> None:
    """timm's ScaledStdConv2d has a `scale`, which delayed recipes have too."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 16)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias) * self.scale

    model, x = nn.Sequential(Scaled(), nn.Linear(16, 16)), torch.ones(1, 32)
    expected = model(x)
    for _ in range(2):  # the second time, of a layer that is converted already
        with pytest.raises(ValueError, match="convert: 0 has an attribute 'scale' of its own, and"):
            mixprec.convert(model, "fp8-delayed")
        assert not any("1.scale" in name for name in model.state_dict())
        torch.testing.assert_close(mixprec.convert(model, "bf16")(x), expected, rtol=2e-2, atol=0.1)


def test_what_is_left_is_reported(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    def report(model: nn.Module, **options: Any) -> str:
        with caplog.at_level(logging.INFO, "mixprec"):
            mixprec.convert(model, "bf16", **options)
        return caplog.messages[-1]

    tied, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    head.weight = tied.weight
    model = nn.ModuleDict({"adapted": Adapted(64), "tied": tied, "head": head, "packed": Packed()})
    model["unused"] = nn.Embedding(64, 32)  # which no product reads, so that it does not count
    packed = "(packed: there is no such layer in mixprec.nn)"
    adapter = "Linear 11.1% (adapted.lora_A.default, adapted.lora_B.default: an adapter of peft)"
    with pytest.warns(UserWarning, match="reaches 67% of the weights; left out: Packed 22.2% "):
        text = report(model)
    assert text.endswith(f": 67% of the weights; left out: Packed 22.2% {packed}, {adapter}")
    del model["packed"]
    model["more"] = nn.Linear(32, 96)
    recwarn.clear()
    text = report(model, overrides={"more": None})
    assert "2 of 3 layers set to bf16 (2 had it already): 60% of the weights" in text
    assert "left out: Linear 30.0% (more: excluded), Linear 10.0% (" in text
    assert not recwarn.list, "the caller has chosen to exclude it"
    converted = [name for name, m in model.named_modules() if isinstance(m, mixprec.nn.Layer)]
    assert converted == ["adapted.base_layer", "head"]
    del sys.modules["peft.tuners.tuners_utils"]  # then it is a class that only looks like peft's
    assert report(nn.Sequential(Adapted(64))).endswith("100% of the weights")


@pytest.mark.filterwarnings("ignore:convert")
def test_adapters_on_layers_in_4_bits_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear4bit(nn.Linear):
        """In the place of bitsandbytes'."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    module = SimpleNamespace(Linear4bit=Linear4bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", module)
    model = nn.Sequential(Adapted(16), Adapted(16))
    model[0].base_layer = Linear4bit(16, 16)
    mixprec.convert(model, "bf16")
    converted = [name for name, m in model.named_modules() if isinstance(m, mixprec.nn.Layer)]
    assert converted == ["0.lora_A.default", "0.lora_B.default", "1.base_layer"]
    assert type(model[0].base_layer) is Linear4bit


def loss_of_layers() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(x)
        both = self.conv1d(y) + self.linear(y)
        return both.square().mean() + self.encoder(x[None]).square().mean()

    conv1d, encoder = Conv1D(16, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    parts = {"conv1d": conv1d, "linear": plain_of(conv1d), "encoder": encoder}
    return Model(forward, twice=Twice(32, 32), **parts)
