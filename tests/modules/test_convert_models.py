"""How much of the models of other libraries convert reaches, where these are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import mixprec
from mixprec.functional import observed
from mixprec.nn.kinds import coverage

TIMM = {"nfnet_f0": set(), "convnext_atto": set(), "vit_tiny_patch16_224": {"VisionTransformer"},
        "swin_tiny_patch4_window7_224": {"WindowAttention"}, "efficientnet_b0": set()}  # fmt: skip
TORCHVISION = {"resnet18": set(), "vit_b_16": {"VisionTransformer", "Encoder"}}
IMAGE = (torch.randn(1, 3, 224, 224),)


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


@torch.no_grad()
def run(model: nn.Module, *args: Any, **inputs: Any) -> list[torch.Tensor]:
    return [y for y in tree_leaves(model(*args, **inputs)) if isinstance(y, torch.Tensor)]


def check(model: nn.Module, left: set[str], least: float = 0.97, **inputs: Any) -> None:
    """What is in layers with a recipe, that each of them uses it in a forward pass, and that
    unconvert gives the first model back."""
    before = sum(p.numel() for p in model.parameters())
    model.eval()
    args, state, kinds = inputs.pop("args", ()), model.state_dict(keep_vars=True), classes(model)
    expected = run(model, *args, **inputs) if args or inputs else []
    model = mixprec.convert(model, "bf16")
    found = coverage(model)
    assert {kind for kind, _ in found.left} == left, str(found)
    assert found.converted >= least * found.total
    assert sum(p.numel() for p in model.parameters()) == before
    if expected:
        used: set[str] = set()
        with observed(lambda kind, name, a, b: used.add(name)):
            run(model, *args, **inputs)
        layers = {name for name, m in model.named_modules() if isinstance(m, mixprec.nn.Layer)}
        assert used == layers
    mixprec.unconvert(mixprec.convert(model, "fp8"))
    assert classes(model) == kinds
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(state)
    assert all(now[name] is value for name, value in state.items())
    if expected:
        assert all(map(torch.equal, run(model, *args, **inputs), expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    check(pytest.importorskip("timm").create_model(name), TIMM[name], args=IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    check(getattr(pytest.importorskip("torchvision").models, name)(), TORCHVISION[name], args=IMAGE)


def test_torch() -> None:
    check(nn.Transformer(32, 4, 1, 1, 64), set(), 1.0)
    with pytest.warns(UserWarning, match="Bilinear 100.0%"):
        check(nn.Sequential(nn.Linear(2, 2), nn.Bilinear(32, 32, 32)), {"Bilinear"}, 0.0)
