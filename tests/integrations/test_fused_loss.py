"""fuse_loss: the loss and gradients of models of transformers, without logits."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.loss import loss_utils  # noqa: E402

import mixprec  # noqa: E402
from mixprec.integrations import fused_loss  # noqa: E402
from mixprec.integrations.transformers import fuse_loss  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = torch.arange(3, 27).view(2, 12)
LABELS = torch.where(TOKENS % 7 == 0, -100, TOKENS)


def made(entry: str = "llama/LlamaForCausalLM", **config: Any) -> Any:
    where, name = entry.split("/")
    kind = getattr(importlib.import_module(f"transformers.models.{where}.modeling_{where}"), name)
    torch.manual_seed(0)
    dropouts = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    model = kind(kind.config_class(**{**SIZES, **config, **dropouts})).float().train()
    return mixprec.convert(model, "bf16")


def grads(model: Any, **inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    output = model(input_ids=TOKENS, labels=LABELS, **inputs)
    output.loss.backward()
    return output, [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_training(model: Any, **inputs: Any) -> None:
    twin = fuse_loss(copy.deepcopy(model))
    (theirs, expected), (ours, found) = grads(model, **inputs), grads(twin, **inputs)
    assert type(ours) is type(theirs)
    assert ours.logits is None
    assert set(ours) == set(theirs) - {"logits", "cache", "past_key_values"}
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("entry", [
    "llama/LlamaForCausalLM", "mistral/MistralForCausalLM", "qwen3/Qwen3ForCausalLM",
    "phi3/Phi3ForCausalLM", "gemma/GemmaForCausalLM", "olmo_hybrid/OlmoHybridForCausalLM",
    "lfm2/Lfm2ForCausalLM",
])  # fmt: skip
def test_each_class_trains_as_without(entry: str) -> None:
    assert_same_training(made(entry))


@pytest.mark.parametrize("inputs", [
    {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}, {"ignore_index": -100},
    {"shift_labels": LABELS}, {"attention_mask": (TOKENS > 4).long()},
    {"output_hidden_states": True},
])  # fmt: skip
def test_the_arguments_of_the_loss_and_of_the_body(inputs: dict[str, Any]) -> None:
    assert_same_training(made(tie_word_embeddings=True), **inputs)


def test_logits_are_returned_where_they_are_asked_for() -> None:
    model = made()
    fused = fuse_loss(copy.deepcopy(model))
    kinds = {"logits_to_keep": 2}, {"return_dict": False}, {"labels": None}, {"use_cache": True}
    for inputs in kinds:
        call = {
            "input_ids": TOKENS,
            "labels": TOKENS[:, -2:] if "logits_to_keep" in inputs else LABELS,
        }
        ours, theirs = (m(**{**call, **inputs}) for m in (fused, model))
        assert torch.equal(ours[0], theirs[0])
        assert ours[1 if "labels" not in inputs else 0].shape[-1] == 99
    assert torch.equal(fused.eval()(TOKENS, labels=LABELS).logits, model.eval()(TOKENS).logits)
    assert fused.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (2, 14)
    fused.train().loss_function = lambda logits, labels, **_: logits.sum() + labels.sum()
    assert fused(input_ids=TOKENS, labels=LABELS).logits is not None


def test_a_patched_loss_and_another_head_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuse_loss(made())
    head, fused.lm_head = fused.lm_head, nn.Sequential(fused.lm_head)
    assert fused(input_ids=TOKENS, labels=LABELS).logits is not None
    fused.lm_head = head
    assert fused(input_ids=TOKENS, labels=LABELS).logits is None
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *args, **_: torch.tensor(7.0))
    assert fused(input_ids=TOKENS, labels=LABELS).loss == 7.0


def test_pickled_with_torch_save() -> None:
    fused = fuse_loss(made())
    torch.save(fused, buffer := io.BytesIO())
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is type(fused)
    ours, theirs = (m(input_ids=TOKENS, labels=LABELS) for m in (again, fused))
    assert ours.logits is None
    assert torch.equal(ours.loss, theirs.loss)


def test_positional_arguments_copies_and_torch_compile() -> None:
    model = fuse_loss(made())
    assert fuse_loss(model) is model
    assert inspect.signature(model.forward) == inspect.signature(made().forward)
    assert type(model).__name__ == "LlamaForCausalLM"
    loss = model(input_ids=TOKENS, labels=LABELS).loss
    assert torch.equal(copy.deepcopy(model)(TOKENS, None, None, None, None, LABELS).loss, loss)
    compiled = torch.compile(model, backend="aot_eager")(input_ids=TOKENS, labels=LABELS)
    assert compiled.logits is None
    torch.testing.assert_close(compiled.loss, loss, rtol=1e-3, atol=1e-3)


def test_what_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made()
    kind = type(plain)
    with pytest.raises(TypeError, match=r"lm_head must be a mixprec.nn.Linear, got Linear: call"):
        fuse_loss(kind(plain.config))
    mine: Any = type("LlamaForCausalLM", (kind,), {})
    for model in (nn.Linear(2, 2), mine(plain.config), SimpleNamespace()):
        with pytest.raises(TypeError, match="must be a causal language model that is known here"):
            fuse_loss(model)
    fused = fuse_loss(made())
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: "replaced")
    assert fused(input_ids=TOKENS, labels=LABELS) == "replaced"
    with pytest.raises(TypeError, match="must be a causal language model that is known here"):
        fuse_loss(plain)
    assert fused_loss._is_known(kind) is False
