"""convert(fuse=True) of models of transformers: what is fused, and that they compute the same."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.testing import sqnr  # noqa: E402

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
LLAMA_PARTS = (
    "layers with one input share its cast in {}Attention (2)",
    "norm (5)",
    "linear, activation * linear, linear (2)",
)


def models() -> Iterator[tuple[Any, tuple[str, ...]]]:
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), LLAMA_PARTS
    yield transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)), LLAMA_PARTS
    qwen3 = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16))
    yield qwen3, (LLAMA_PARTS[0], "norm (9)", LLAMA_PARTS[2])  # with those of queries and keys
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, **dropout
    )
    yield transformers.GPT2LMHeadModel(config), ("linear, activation, linear (2)",)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_known_blocks_are_fused_and_compute_the_same(
    recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    for model, parts in models():
        torch.manual_seed(0)
        tokens = torch.randint(0, 100, (2, 32))

        def gradients(model: Any, tokens: torch.Tensor = tokens) -> dict[str, torch.Tensor]:
            model.train()
            model(input_ids=tokens, labels=tokens).loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}

        exact = gradients(copy.deepcopy(model).double())
        plain = gradients(mixprec.convert(copy.deepcopy(model), recipe))
        fused = copy.deepcopy(model)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mixprec"):
            mixprec.convert(fused, recipe, fuse=True)
        for part in parts:
            assert part.format(type(model).__name__.removesuffix("ForCausalLM")) in caplog.text
        got = gradients(fused)
        for name, grad in exact.items():
            floor = float(sqnr(grad, plain[name])) - 6.0
            assert float(sqnr(grad, got[name])) > floor, (type(model).__name__, name)
        mixprec.unconvert(fused)
        assert [type(m) for m in fused.modules()] == [type(m) for m in model.modules()]


def test_what_transformers_asks_of_a_class_stays(tmp_path: Path) -> None:
    tokens = torch.randint(0, 100, (2, 9))
    for model, _ in models():
        options = {"output_hidden_states": True, "labels": tokens}
        kind, signature = type(model), inspect.signature(model.forward)
        plain = len(model(tokens, **options).hidden_states)
        mixprec.convert(model.eval(), "bf16", fuse=True)
        assert str(type(model)) == str(kind)
        assert inspect.signature(model.forward) == signature
        assert len(model(tokens, **options).hidden_states) == plain
        model.save_pretrained(tmp_path)
        assert type(kind.from_pretrained(tmp_path)) is kind
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
            kind.__name__
        ]
        model.gradient_checkpointing_enable()
        model.train()
        model(tokens, labels=tokens).loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.gradient_checkpointing_disable()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
