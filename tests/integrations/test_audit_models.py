"""audit of models of transformers: owners, FLOPs, who decided, and no finding without a fault."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402

T = transformers
TOKENS = torch.arange(48).view(2, 24) % 90
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 6 * 1024).view(2, 3, 32, 32)}
IMAGES["labels"] = torch.tensor([0, 1])
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, TEXT),
    "Mistral": ("MistralForCausalLM", GROUPED, TEXT),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Phi3": ("Phi3ForCausalLM", {}, TEXT),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}, TEXT),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}, TEXT),
    "Bert": ("BertForMaskedLM", {}, TEXT),
    "Roberta": ("RobertaForMaskedLM", {}, TEXT),
    "Electra": ("ElectraForMaskedLM", {"embedding_size": 32}, TEXT),
    "ViT": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}, IMAGES),
    "ConvNext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        IMAGES,
    ),
}


def make(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    kind, more, batch = MODELS[name]
    cls = getattr(T, kind)
    torch.manual_seed(0)
    return cls(cls.config_class(**{**SIZES, **more})).train(), batch


def expected(model: nn.Module, batch: dict[str, torch.Tensor]) -> Counter[str]:
    """FLOPs of the forward pass of each layer, from what a hook sees."""
    found: Counter[str] = Counter()

    def add(name: str, layer: Any) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            if isinstance(module, nn.Linear):
                found[name] += 2 * args[0].numel() * module.out_features
            else:
                found[name] += 2 * out.numel() * layer.weight[0].numel()

        return layer.register_forward_hook(hook)

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [add(name, layer) for name, layer in layers]
    model(**batch)
    for handle in handles:
        handle.remove()
    return found


WAYS = ("fp32", "torch.autocast", "bf16 model", "bf16", "bf16 fused", "fp8", "checkpointed")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_own_their_products(name: str, way: str) -> None:
    model, batch = make(name)
    want = expected(model, batch)
    precision, decided = {
        "torch.autocast": ("bf16", "torch.autocast"),
        "bf16 model": ("bf16", "as made"),
        "fp8": ("fp8", "recipe fp8"),
    }.get(way, ("bf16", "recipe bf16") if way.startswith("bf16") else ("fp32", "as made"))
    if way == "bf16 model":
        model.bfloat16()
        batch = {k: t.bfloat16() if t.is_floating_point() else t for k, t in batch.items()}
    elif way.startswith("bf16") or way == "fp8":
        mixprec.convert(model, way.split()[0], fuse=way.endswith("fused"))
    elif way == "checkpointed":
        if not model.supports_gradient_checkpointing:
            pytest.skip(f"{name} has no checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    region = torch.autocast("cpu", torch.bfloat16) if way == "torch.autocast" else nullcontext()
    with region:
        audit = mixprec.audit(model, batch)
    forward: Counter[str] = Counter()
    for op in audit.ops:
        if op.module in want and op.flops:
            assert op.precision == precision, op
            assert op.decided == decided, op
            forward[op.module] += op.flops if op.phase == "forward" else 0
    assert forward == want
    backward = Counter(op.module for op in audit.ops if op.phase == "backward" and op.flops)
    assert backward.keys() >= want.keys()
    assert all(op.module is not None for op in audit.ops if op.flops)
    assert [line for line in audit.findings if "the loss" not in line] == []
    share = sum(n for who, n in audit.decided.items() if who == "unknown")
    assert share <= 0.02 * sum(audit.flops.values())
