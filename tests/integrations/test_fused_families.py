"""Each class of transformers that convert(fuse=True) knows, against its own forward pass."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import mixprec  # noqa: E402
from mixprec.nn import known  # noqa: E402
from mixprec.nn._content import content_of  # noqa: E402
from mixprec.testing import sqnr  # noqa: E402

K = 48
# A class of each content that is known, with the attributes that it reads: the layers before the
# activation, this, the last layer and the dropout.
NORMS = ("llama/LlamaRMSNorm", "gemma/GemmaRMSNorm")
GATED = ("gate_proj up_proj", "act_fn", "down_proj", "")
MLPS = {
    "llama/LlamaMLP": GATED,
    "glm4v/Glm4VisionMlp": GATED,
    "idefics2/Idefics2MLP": GATED,
    "vit/ViTMLP": ("fc1", "activation_fn", "fc2", ""),
    "arcee/ArceeMLP": ("up_proj", "act_fn", "down_proj", ""),
    "qwen3_vl/Qwen3VLVisionMLP": ("linear_fc1", "act_fn", "linear_fc2", ""),
    "sam/SamMLPBlock": ("lin1", "act", "lin2", ""),
    "qwen2_vl/VisionMlp": ("fc1", "act", "fc2", ""),
    "gpt_neox/GPTNeoXMLP": ("dense_h_to_4h", "act", "dense_4h_to_h", ""),
    "gpt2/GPT2MLP": ("c_fc", "act", "c_proj", "dropout"),
    "gptj/GPTJMLP": ("fc_in", "act", "fc_out", "dropout"),
}
ACTIVATIONS = (
    *("/SiLUActivation", "/GELUActivation", "/GELUTanh", "/NewGELUActivation"),
    "/ReLUSquaredActivation",
)
HALVES = ("bert/BertIntermediate", "bert/BertOutput")
# The layer, and the beginning of the names of its halves.
LAYERS = {
    "bert/Bert": "Bert",
    "electra/Electra": "Electra",
    "bridgetower/BridgeTowerText": "BridgeTower",
}
ACTS = ("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "relu2")


def class_of(entry: str) -> Any:
    """transformers.models.NAME.modeling_NAME as NAME/Class."""
    where, name = entry.split("/")
    path = f"models.{where}.modeling_{where}" if where else "activations"
    return getattr(importlib.import_module(f"transformers.{path}"), name)


def with_attributes(kind: Any, **attributes: Any) -> Any:
    """A module of the class without its own constructor."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def made(entry: str) -> Iterator[nn.Module]:
    """Modules of the class, with every attribute moved from its default."""
    kind, moved = class_of(entry), []
    if entry in ACTIVATIONS:
        moved = [kind(True), kind()] if "__init__" in vars(kind) else [kind()]
    elif entry in NORMS:
        moved = [kind(K, eps) for eps in (1e-6, 0.3)]
    elif entry == "gpt2/GPT2MLP":
        for act in ACTS:
            config = SimpleNamespace(hidden_size=K, activation_function=act, resid_pdrop=0.5)
            moved.append(kind(80, config))
    else:
        first, act_name, last, dropout = MLPS[entry]
        for act in ACTS if entry in ("llama/LlamaMLP", "vit/ViTMLP") else ACTS[:3:2]:
            parts: dict[str, nn.Module] = {layer: nn.Linear(K, 80) for layer in first.split()}
            parts |= {act_name: transformers.activations.ACT2FN[act], last: nn.Linear(80, K)}
            moved.append(with_attributes(kind, **parts, **{dropout or "_": nn.Dropout(0.5)}))
    for module in moved:
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
        yield module


def compare(plain: nn.Module, run: Any, x: torch.Tensor) -> nn.Module:
    """The model, fused: output and gradients are as near to FP64 as without fusion."""
    exact = copy.deepcopy(plain).double()
    fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
    mixprec.convert(plain, "bf16")
    ends = []
    for model in (exact, plain, fused):
        given = x.to(next(model.parameters()).dtype).requires_grad_()
        torch.manual_seed(1)  # of dropout
        y = run(model, given)
        y.square().mean().backward()
        ends.append([y, given.grad, *(p.grad for p in model.parameters())])
    for true, separate, in_one in zip(*ends, strict=True):
        assert separate.dtype == in_one.dtype
        assert float(sqnr(true, in_one)) > float(sqnr(true, separate)) - 6, type(plain)
    return fused


@pytest.mark.parametrize("entry", [*NORMS, *MLPS, *ACTIVATIONS])
def test_the_description_is_what_the_class_computes(entry: str) -> None:
    fused_any = False
    for module in made(entry):
        plain = nn.Sequential(nn.Linear(K, K), module, nn.Linear(K, K))
        run = (lambda m, x: m[2](m[1](m[0](x)))) if entry[0] != "/" else (lambda m, x: m(x))
        fused = compare(plain, run, torch.randn(16, 33, K))
        fused_any |= "forward" in vars(fused[1]) or "forward" in vars(fused)
    assert fused_any


def test_a_class_of_each_content_is_compared() -> None:
    kinds = map(class_of, (*NORMS, *MLPS, *ACTIVATIONS, *HALVES))
    assert {content_of(kind).digest for kind in kinds} == known._CONTENTS.keys()


def encoder_layer(entry: str, act: str = "gelu") -> Any:
    """A layer of which the method feed_forward_chunk alone can be called."""
    half = f"{entry.split('/')[0]}/{LAYERS[entry]}"
    act_fn, norm = transformers.activations.ACT2FN[act], nn.LayerNorm(K, eps=0.3)
    parts = {"dense": nn.Linear(K, 80), "intermediate_act_fn": act_fn}
    first = with_attributes(class_of(f"{half}Intermediate"), **parts)
    parts = {"dense": nn.Linear(80, K), "dropout": nn.Dropout(0.5), "LayerNorm": norm}
    second = with_attributes(class_of(f"{half}Output"), **parts)
    return with_attributes(class_of(f"{entry}Layer"), intermediate=first, output=second)


@pytest.mark.parametrize("entry", LAYERS)
def test_the_mlp_of_an_encoders_layer_is_its_method(entry: str) -> None:
    for act in ("gelu", "gelu_new"):
        layer = encoder_layer(entry, act)
        fused = compare(layer, lambda m, x: m.feed_forward_chunk(x), torch.randn(16, 33, K))
        assert "feed_forward_chunk" in vars(fused)
        assert "feed_forward_chunk" not in vars(mixprec.unconvert(fused))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("where", [mixprec.autocast, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_regions_give_the_dtype_that_they_give_without(act: str, where: Any) -> None:
    mlp = with_attributes(
        class_of("phi/PhiMLP"), fc1=nn.Linear(K, 80),
        activation_fn=transformers.activations.ACT2FN[act], fc2=nn.Linear(80, K),
    )  # fmt: skip
    mlp = mixprec.cast_parameters(mixprec.convert(mlp, "bf16"), torch.bfloat16)
    fused = mixprec.convert(copy.deepcopy(mlp), "bf16", fuse=True)
    x = torch.randn(2, 9, K, dtype=torch.bfloat16)
    with where():
        y, got = mlp(x), fused(x)
    assert got.dtype == y.dtype
    assert float(sqnr(y, got)) > 30


def bert() -> tuple[Any, torch.Tensor]:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=K, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=80, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel(config)
    for layer in (model.encoder.layer[0].intermediate, model.encoder.layer[0].output):
        nn.init.normal_(layer.dense.weight, std=0.4)
    return model, torch.randint(0, 64, (2, 9))


def replace_output(layer: Any) -> None:
    other = copy.deepcopy(layer.output)
    other.dense.weight.data.mul_(3)
    layer.output = other


def test_a_layer_with_a_half_of_another_class_is_left() -> None:
    model, tokens = bert()
    half = model.encoder.layer[0].output
    half.__class__ = type("Other", (type(half),), {})
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    fused = mixprec.convert(model, "bf16", fuse=True)
    y, got = (m(tokens).last_hidden_state.detach() for m in (plain, fused))
    assert float(sqnr(y, got)) > 30


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 1, 2)[..., :80]


CHANGES: dict[str, Any] = {
    "a hook on a half": lambda layer: layer.output.register_forward_hook(lambda m, x, y: 2 * y),
    "a forward of its own": lambda layer: setattr(layer.intermediate, "forward", wide),
    "a method of its own": lambda layer: setattr(layer, "feed_forward_chunk", sine),
    "another class": lambda layer: setattr(
        layer,
        "__class__",
        type("BertLayer", (type(layer),), {"feed_forward_chunk": lambda self, x: sine(x)}),
    ),
    "weights of its own": replace_output,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_into_a_layer_after_fusing_is_used(change: str) -> None:
    model, tokens = bert()
    model.eval()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    fused = mixprec.convert(model, "bf16", fuse=True)
    for one in (plain, fused):
        torch.manual_seed(3)
        CHANGES[change](one.encoder.layer[0])
    y, got = (one(tokens).last_hidden_state for one in (plain, fused))
    assert float(sqnr(y, got)) > 30  # attention and, where it still fits, the MLP are fused


def test_copies_of_a_layer_use_their_own_halves() -> None:
    model, tokens = bert()
    fused = mixprec.convert(model.eval(), "bf16", fuse=True)
    layer, x = fused.encoder.layer[0], torch.randn(2, 9, K)
    y = layer(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(other(tokens).last_hidden_state, fused(tokens).last_hidden_state)
    shallow = copy.copy(layer)
    shallow._modules = dict(layer._modules)
    replace_output(shallow)
    assert float(sqnr(y, shallow(x))) < 20
    assert torch.equal(layer(x), y)
    layer.chunk_size_feed_forward = 3
    assert float(sqnr(y, layer(x))) > 40
    layer.train(), layer.zero_grad()
    grads = []
    for checkpointing in (False, True):
        layer.gradient_checkpointing = checkpointing
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer(x.requires_grad_()).square().mean().backward()
        grads.append([p.grad for p in layer.parameters()])
        layer.zero_grad()
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_keep_the_dtype_of_their_result(dtype: torch.dtype) -> None:
    for entry in NORMS:
        for weights in (torch.float32, dtype):
            (module, _) = made(entry)
            module = module.to(weights)
            both = nn.ModuleList([nn.Linear(2, 2), module])
            fused = mixprec.convert(copy.deepcopy(both), fuse=True)
            x = torch.randn(3, K).to(dtype)
            y, got = (
                module(x),
                fused[1](**{next(iter(inspect.signature(module.forward).parameters)): x}),
            )
            assert got.dtype == y.dtype, (entry, weights)
            torch.testing.assert_close(got, y, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_padding_and_packed_sequences() -> None:
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


# Whole models of transformers: what is fused, and that they compute the same


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
