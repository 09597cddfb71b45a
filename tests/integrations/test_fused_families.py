"""Each class of transformers that convert(fuse=True) knows, against its own forward pass."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.integrations import fused_transformers  # noqa: E402
from mixprec.nn import known  # noqa: E402
from mixprec.nn.known import NormSpec, spec_of  # noqa: E402
from mixprec.testing import sqnr  # noqa: E402

K = 48
CLASSES = [(path, name) for path, names in fused_transformers.CLASSES.items() for name in names]
ACTS = ("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu2")


def class_of(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.{path}"), name)


def made(path: str, name: str) -> Iterator[nn.Module]:
    """Modules of the class, with every attribute moved from its default."""
    kind, moved = class_of(path, name), []
    if path == "activations":
        moved = [kind(True), kind()] if "__init__" in vars(kind) else [kind()]
    elif name.endswith("Norm"):
        moved = [kind(K, eps) for eps in (1e-6, 0.3)]
    else:
        for act in ACTS:
            config = SimpleNamespace(
                hidden_size=K, intermediate_size=80, hidden_act=act, hidden_activation=act,
                activation_function=act, mlp_bias=act == "silu", resid_pdrop=0.5,
            )  # fmt: skip
            moved.append(kind(80, config) if name.startswith("GPT2") else kind(config))
    for module in moved:
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
        yield module


@pytest.mark.parametrize(("path", "name"), CLASSES)
def test_the_description_is_what_the_class_computes(path: str, name: str) -> None:
    fused_any = False
    for module in made(path, name):
        x = torch.randn(2, 9, K)
        plain = nn.Sequential(nn.Linear(K, K), module, nn.Linear(K, K))
        exact = copy.deepcopy(plain).double()
        fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
        mixprec.convert(plain, "bf16")
        ends = []
        for model in (exact, plain, fused):
            given = x.to(next(model.parameters()).dtype).requires_grad_()
            torch.manual_seed(1)  # of dropout
            y = model[2](model[1](model[0](given))) if path != "activations" else model(given)
            y.square().mean().backward()
            ends.append([y, given.grad, *(p.grad for p in model.parameters())])
        for true, separate, together in zip(*ends, strict=True):
            assert separate.dtype == together.dtype
            assert float(sqnr(true, together)) > float(sqnr(true, separate)) - 6, module
        fused_any |= "forward" in vars(fused[1]) or "forward" in vars(fused)
    version = ".".join(transformers.__version__.split(".")[:2])
    assert fused_any == (version in fused_transformers.VERSIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_keep_the_dtype_of_their_result(dtype: torch.dtype) -> None:
    for path, name in CLASSES:
        if not name.endswith("Norm"):
            continue
        for weights in (torch.float32, dtype):
            (module, _) = made(path, name)
            module = module.to(weights)
            both = nn.ModuleList([nn.Linear(2, 2), module])
            fused = mixprec.convert(copy.deepcopy(both), fuse=True)
            x = torch.randn(3, K).to(dtype)
            y, got = module(x), fused[1](hidden_states=x) if "Gemma" not in name else fused[1](x=x)
            assert got.dtype == y.dtype, (name, weights)
            torch.testing.assert_close(got, y, rtol=0.02, atol=0.02)


def test_a_class_that_another_library_has_replaced_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    kept, norm = llama.LlamaRMSNorm, llama.LlamaRMSNorm(K)
    fused_transformers.register()
    assert isinstance(spec_of(norm), NormSpec)

    class LlamaRMSNorm(kept):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(hidden_states)

    assert spec_of(LlamaRMSNorm(K)) is None
    monkeypatch.setattr(llama, "LlamaRMSNorm", LlamaRMSNorm)
    fused_transformers.register()
    assert spec_of(LlamaRMSNorm(K)) is None
    monkeypatch.setattr(kept, "forward", LlamaRMSNorm.forward)
    assert spec_of(norm) is None
    norm.forward = norm.forward
    assert spec_of(norm) is None
    monkeypatch.setattr(fused_transformers, "VERSIONS", ())
    monkeypatch.setattr(known, "_known", {})
    fused_transformers.register()
    assert not known._known, "a version that was not tested"


@pytest.mark.slow
def test_padding_packed_sequences_and_dropout_are_torchs() -> None:
    """Attention with a mask, and every mask that transformers makes."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    fused = mixprec.convert(model, "bf16", fuse=True)
    tokens = torch.randint(0, 100, (2, 24))
    padding = torch.ones_like(tokens)
    padding[0, :7] = 0
    packed = torch.tensor([[*range(9), *range(15)]] * 2)
    for options in ({}, {"attention_mask": padding}, {"position_ids": packed}, {"use_cache": True}):
        y, got = (m(input_ids=tokens, **options).logits for m in (plain, fused))
        assert float(sqnr(y, got)) > 30, [*options]
    both, apart = torch.cat([tokens[:, :9], tokens[:, :9].flip(1)], 1), [*range(9), *range(9)]
    packed = torch.tensor([apart] * 2)
    first, second = (fused(input_ids=both, position_ids=ids).logits for ids in (packed, None))
    assert not torch.allclose(first, second, atol=1e-3), "packed sequences do not see each other"
    text = [m.generate(tokens[:, :8], max_new_tokens=8, do_sample=False) for m in (plain, fused)]
    assert torch.equal(*text)
