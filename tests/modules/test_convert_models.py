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

# The library, its class or name, its settings, and what is left: kinds of modules.
TRANSFORMERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "GPT2LMHeadModel": ({"n_embd": 64, "n_layer": 2, "n_head": 4}, set()),
    "LlamaForCausalLM": ({}, set()),
    "MixtralForCausalLM": ({"num_local_experts": 4}, {"MixtralTopKRouter"}),
    "BertForMaskedLM": ({}, set()),
    "T5ForConditionalGeneration": ({"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}, set()),
    "ViTForImageClassification": ({"image_size": 32, "patch_size": 8}, {"ViTEmbeddings"}),
    "Qwen3MoeForCausalLM": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        {"Qwen3MoeTopKRouter"},
    ),
}  # fmt: skip
COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
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
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings, left = TRANSFORMERS[name]
    kind = getattr(transformers, name)
    config = kind.config_class(**{**COMMON, **settings})
    ids = torch.randint(0, 128, (2, 8))
    inputs = {"input_ids": ids}
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = ids
    check(kind(config), left, 0.9, **inputs)  # the router of a small mixture is not that small


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
