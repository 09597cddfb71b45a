"""Converted layers take the arguments of the layers that they replace, by torch's names too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import for_each
from layer_cases import Own
from torch import nn

import mixprec
from mixprec.stats import Monitor


class Scaled(nn.Linear):
    def forward(self, features: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return nn.functional.linear(features * factor, self.weight, self.bias)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(16, 16), {"input": torch.randn(4, 16)}),
    "own": (lambda: Own(16, 16), {"input": torch.randn(4, 16)}),
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


def test_conv1d_of_transformers_and_frozen_layers() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    x = torch.randn(4, 16)
    layer = mixprec.convert(utils.Conv1D(8, 16), "fp8")
    assert torch.equal(layer(x=x), layer(x))
    frozen, _ = mixprec.freeze(nn.Linear(16, 8))
    assert torch.equal(frozen(input=x), frozen(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(input=self.norm(input=self.first(input=x))).sum()


def test_what_measures_layers_sees_calls_by_keyword() -> None:
    net, x = mixprec.convert(Net(), "fp8", overrides={"last": None}), torch.randn(8, 16)
    with mixprec.audit(net, sqnr=True) as audit:
        net(x).backward()
    found = {name for op in audit.ops if op.module == "first" for name in op.lost}
    assert {"y", "grad_weight"} <= found
    with Monitor(net, every=1) as monitor:
        net(x).backward()
        monitor.step()
    assert {row["layer"] for row in monitor.records[-1]["tensors"]} == {"first"}
    (row,) = mixprec.compare(Net, [(x,)], ("fp32",)).rows
    assert row.gemms["first", "forward", "fp32 x fp32 (torch)"] == 1
    assert row.gemms["last", "grad_input", "fp32 x fp32 (torch)"] == 1
