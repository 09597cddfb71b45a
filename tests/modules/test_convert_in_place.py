"""Modules that convert changes in place: what users' classes, copies and checkpoints make of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import for_each, normal
from models import Model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import _said
from mixprec.stats import Monitor


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


REGIONS = [mixprec.autocast, lambda: mixprec.autocast("bf16"), lambda: mixprec.simulate("hopper")]


@for_each("region", REGIONS)
@for_each("reentrant", [False, True])
def test_a_forward_of_its_own_is_recomputed_by_the_recipe(
    region: Callable[[], mixprec.autocast], reentrant: bool
) -> None:
    layer, grads = mixprec.convert(Own(16, 16), "fp8"), []
    x = normal((4, 16), torch.float32).requires_grad_()
    for again in (False, True):
        layer.zero_grad()
        with region():
            y = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
            y.square().sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


@for_each("name", ["_one_product", "_is_transposed", "recipe", "_quantize_weight", "_check_names"])
def test_attributes_of_a_users_class_are_not_replaced(name: str) -> None:
    layer = type("Mine", (nn.Linear,), {name: "mine"})(4, 4)
    with pytest.raises(ValueError, match=f"0 has an attribute '{name}' of its own.*overrides"):
        mixprec.convert(nn.Sequential(layer), "bf16")
    assert type(layer).__name__ == "Mine"
    layer = nn.Linear(4, 4)
    setattr(layer, name, "mine")
    with pytest.raises(ValueError, match=f"the model has an attribute '{name}'"):
        mixprec.convert(layer, "bf16")
    layer = nn.Linear(4, 4)
    layer.register_buffer(name, torch.zeros(1))
    with pytest.raises(ValueError, match=f"the model has an attribute '{name}'"):
        mixprec.convert(layer, "bf16")


def test_a_name_stays_that_of_the_users_class() -> None:
    class Named(nn.Linear):
        name = "abc"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * len(self.name)

    layer, x = Named(8, 8), normal((2, 8), torch.bfloat16)
    plain = copy.deepcopy(layer).bfloat16()(x)
    y = mixprec.convert(layer, "bf16")(x)
    assert layer.name == "abc"
    assert (y - plain).abs().max() <= 0.02 * plain.abs().max()


def test_a_shallow_copy_is_another_layer() -> None:
    plain = nn.Linear(8, 8)
    mixprec.convert(copy.copy(plain), "fp8-delayed")
    assert [*plain.state_dict()] == ["weight", "bias"]
    layer = mixprec.convert(plain, "fp8-delayed")
    mixprec.unconvert(copy.copy(layer))
    layer(torch.randn(2, 8))
    mixprec.convert(copy.copy(layer), "bf16")
    assert "scale" in layer.state_dict()


def test_a_forward_replaced_after_convert_is_refused() -> None:
    layer = mixprec.convert(nn.Linear(4, 4), "bf16")
    layer.forward = lambda x: x
    with pytest.raises(ValueError, match="the model has its own forward"):
        mixprec.convert(layer, "fp8")


@for_each("stride, dilation, width", [((1, 2), (2, 2), 6), ((2, 2), (1, 1), 3), ((1, 3), 1, 5)])
def test_an_output_of_one_column(stride: object, dilation: object, width: int) -> None:
    """torch's own bf16 convolution is wrong there on some processors."""
    x = normal((2, 4, 5, width), torch.bfloat16)
    for height in (1, 3):
        conv = nn.Conv2d(4, 2, (height, 3), stride=stride, dilation=dilation).bfloat16()
        want = copy.deepcopy(conv).float()(x.float())
        got = mixprec.convert(conv, "bf16")(x)
        assert got.shape[3] == 1
        assert (got.float() - want).abs().max() <= 2.0**-8 * want.abs().max()


def test_layers_that_are_not_measured_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_said, "_said", set())
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    model = mixprec.convert(nn.Sequential(nn.Linear(8, 8), Own(8, 8)), "fp8")
    mixprec.stats.Monitor(model)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mixprec: Monitor: not measured")
    assert line.endswith(": 1")


# torch.jit and torch.fx, which cannot trace the layers


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (2, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 3, 5, 5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 3)), (1, 3, 5)),
}


@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and traced
@for_each("fuse", [False, True])
@for_each("recipe", ["bf16", "fp8"])
@for_each("name", MODELS)
def test_the_error_names_unconvert(name: str, recipe: str, fuse: bool) -> None:
    make, shape = MODELS[name]
    model, x = mixprec.convert(make(), recipe, fuse=fuse), torch.randn(shape)
    for trace in (torch.jit.script, lambda m: torch.jit.trace(m, x), torch.fx.symbolic_trace):
        with pytest.raises((RuntimeError, TypeError), match=r"mixprec\.unconvert\(model\)"):
            trace(model)
    with mixprec.autocast(enabled=False):
        torch.jit.trace(model, x)
    torch.jit.trace(mixprec.unconvert(model), x)


# Converted layers take the arguments of the layers that they replace, by torch's names too


class Derived(nn.Linear):
    """A subclass without a forward pass of its own."""


class Scaled(nn.Linear):
    def forward(self, features: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return nn.functional.linear(features * factor, self.weight, self.bias)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(16, 16), {"input": torch.randn(4, 16)}),
    "own": (lambda: Derived(16, 16), {"input": torch.randn(4, 16)}),
    "scaled": (lambda: Scaled(16, 16), {"features": torch.randn(4, 16), "factor": 2.0}),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3), {"input": torch.randn(1, 4, 5, 5)}),
    "pointwise": (lambda: nn.Conv2d(4, 4, 1), {"input": torch.randn(1, 4, 5, 5)}),
    "attention": (
        lambda: nn.MultiheadAttention(16, 2),
        dict.fromkeys(("query", "key", "value"), torch.randn(3, 2, 16)) | {"need_weights": False},
    ),
}


def output(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    y = layer(*args, **kwargs)
    return y[0] if isinstance(y, tuple) else y


@for_each("kind", CALLS)
def test_by_keyword_as_by_position(kind: str) -> None:
    make, kwargs = CALLS[kind]
    layer = make()
    args = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    rest = {name: v for name, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    plain = output(layer, **kwargs)
    layer = mixprec.convert(layer, "fp8", saved="int8")
    want = output(layer, *args, **rest)
    assert torch.equal(output(layer, **kwargs), want)
    assert not torch.equal(want, plain)
    assert torch.equal(torch.func.functional_call(layer, {}, (), kwargs)[0], layer(**kwargs)[0])
    with mixprec.autocast(enabled=False):
        assert torch.equal(output(layer, **kwargs), plain)
    whole = not isinstance(layer, mixprec.nn.Intercepted)  # which is left out of the graph
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=whole)
    assert torch.equal(output(compiled, **kwargs), want)


def net() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.last(input=self.norm(input=self.first(input=x))).sum()

    first, last = nn.Linear(16, 16), nn.Linear(16, 1)
    return Model(forward, first=first, norm=nn.LayerNorm(16), last=last)


def test_what_measures_layers_sees_calls_by_keyword() -> None:
    model, x = mixprec.convert(net(), "fp8", overrides={"last": None}), torch.randn(8, 16)
    with mixprec.audit(model, sqnr=True) as audit:
        model(x).backward()
    found = {name for op in audit.ops if op.module == "first" for name in op.lost}
    assert {"y", "grad_weight"} <= found
    with Monitor(model, every=1) as monitor:
        model(x).backward()
        monitor.step()
    assert {row["layer"] for row in monitor.records[-1]["tensors"]} == {"first"}
