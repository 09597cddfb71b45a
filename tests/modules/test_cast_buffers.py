"""cast_parameters on models with buffers: what trains after `.bfloat16()` trains after it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from cases import for_each
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import mixprec

LOW = torch.bfloat16


def mean_loss(model: nn.Module) -> float:
    """Of three steps, in whose forward passes spectral norms change their buffers."""
    torch.manual_seed(1)
    total = 0.0
    for x in torch.randn(3, 16, 2, 16):
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad.to(p.dtype))
        model.zero_grad()
        total += loss.item() / 3
    return total


KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[[], nn.Module]]] = {
    "spectral_norm": (parametrizations.spectral_norm, lambda: nn.Conv1d(2, 8, 3)),
    "spectral_norm by hooks": (spectral_norm, lambda: nn.Conv1d(2, 8, 3)),
    "spectral_norm of a linear layer": (spectral_norm, lambda: nn.Linear(16, 16)),
    "pruning": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda: nn.Conv1d(2, 8, 3)),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated")
@for_each("kind", list(KINDS))
@for_each("convert", [False, True])
def test_weights_computed_with_buffers(kind: str, convert: bool) -> None:
    wrap, layer = KINDS[kind]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(wrap(layer()), nn.LeakyReLU(), nn.Flatten())

    model, want = make(), mean_loss(make().bfloat16())
    if convert:
        mixprec.convert(model, "bf16")
    names = [name for name, _ in model.named_buffers()]
    got = mean_loss(mixprec.cast_parameters(model, LOW))
    assert abs(got - want) < 0.02 * want
    assert [name for name, _ in model.named_buffers()] == names
    mixprec.cast_parameters(model, torch.float32)
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert mean_loss(model) > 0


@for_each("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_loss_with_class_weights_is_in_fp32(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(8, 4), "loss": kind(torch.rand(4) + 0.5)})
    x, target = torch.randn(16, 8), torch.randint(4, (16,))
    for _ in range(2):
        mixprec.cast_parameters(model, LOW)
    assert len(model["loss"]._forward_pre_hooks) == 1
    logits = model["head"](x.bfloat16())
    loss = model["loss"](logits, target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, model["loss"](logits.float(), target))
    loss.backward()
    assert model["head"].weight.grad.dtype == LOW


class Positions(nn.Module):
    """A position encoding of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.randn(4, 8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.pe


def test_buffers_that_make_activations_fp32_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        layer = mixprec.convert(nn.Linear(8, 8), "fp8-delayed")
        frozen, _ = mixprec.freeze(nn.Sequential(nn.Linear(8, 8)))
        return nn.Sequential(Positions(), nn.Linear(8, 8), nn.BatchNorm1d(4), layer, frozen)

    x = torch.randn(2, 4, 8, dtype=LOW)
    with caplog.at_level(logging.INFO, "mixprec"):
        left = mixprec.cast_parameters(model(), LOW)
        told = [line for line in caplog.messages if "buffers" in line]
        cast = model()
        cast[0].same = nn.Sequential(Positions())
        cast[0].same[0].pe = cast[0].pe
        mixprec.cast_parameters(cast, LOW, buffers=["0.same.0.pe"])
        mixprec.cast_parameters(model(), torch.float32)
    assert told == [line for line in caplog.messages if "buffers" in line]
    assert told == [
        "cast_parameters: buffers that stay in FP32: 0.pe [4, 8]; activations that meet them "
        "become FP32 unless the model casts these; buffers= casts the buffers"
    ]
    assert left[0](x).dtype == torch.float32
    assert cast(x).dtype == LOW
    assert cast[0].same[0].pe is cast[0].pe
