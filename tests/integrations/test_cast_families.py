"""cast_parameters on models of transformers that need some norms or buffers in 16 bits."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

import mixprec
from mixprec.nn.known_casts import _TRANSFORMERS, _part

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.slow

WIDTH = {"vocab_size": 64, "hidden_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
MAMBA = {**WIDTH, "num_hidden_layers": 2, "state_size": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": MAMBA,
    "FalconMambaForCausalLM": MAMBA,
    "Mamba2ForCausalLM": {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "NemotronHForCausalLM": {
        **WIDTH, **HEADS, "layers_block_type": ["linear_attention", "full_attention"],
        "intermediate_size": 48, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1,
        "ssm_state_size": 4,
    },
    "ZayaForCausalLM": {
        **WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 2, "moe_intermediate_size": 48, "num_experts": 2,
    },
    "MiniMaxForCausalLM": {
        **WIDTH, **HEADS, **EXPERTS, "intermediate_size": 48, "num_hidden_layers": 2,
    },
    "OpenAIGPTLMHeadModel": {"vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 1},
    "XGLMForCausalLM": {
        "vocab_size": 64, "d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 2,
    },
    "M2M100ForConditionalGeneration": SEQ2SEQ,
    "NllbMoeForConditionalGeneration": {**SEQ2SEQ, "num_experts": 2},
}  # fmt: skip
# Of the entries whose name is not that of a model type.
MODEL_TYPES = {
    "blip_2": "blip-2", "kosmos2": "kosmos-2", "kosmos2_5": "kosmos-2.5", "openai": "openai-gpt",
    "nllb_moe": "nllb-moe",
}  # fmt: skip
# Of those that are in no base model by default.
HOLDERS = {
    "fastspeech2_conformer": "FastSpeech2ConformerHifiGan",
    "gemma4": "Gemma4AudioModel", "musicgen": "MusicgenForCausalLM",
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "qwen2_5_omni": "Qwen2_5OmniToken2WavModel",
    "qwen2_5_omni/SinusoidsPositionEmbedding": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "speecht5": "SpeechT5ForSpeechToText", "speecht5/SpeechT5HifiGan": "SpeechT5HifiGan",
    "speecht5/SpeechT5ScaledPositionalEncoding": "SpeechT5ForTextToSpeech",
}  # fmt: skip


def losses(model: Any) -> torch.Tensor:
    """The loss of a step, after a backward pass that reaches the first layer."""
    tokens = torch.arange(24).reshape(2, 12) % 60 + 3
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    torch.manual_seed(1)
    loss = model.eval()(**inputs).loss
    loss.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    assert model.get_input_embeddings().weight.grad.isfinite().all()
    return loss.detach().float()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_trains_where_one_in_16_bits_does(name: str, dtype: torch.dtype) -> None:
    """cast_parameters on Mamba and others that cast to the dtype of a norm, as `.bfloat16()`"""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**FAMILIES[name]))
    exact, low = losses(copy.deepcopy(model)), losses(copy.deepcopy(model).to(dtype))
    bound = max(4 * (low - exact).abs(), exact * 1e-3)
    for recipe in (None, "bf16" if dtype == torch.bfloat16 else "fp16"):
        cast = copy.deepcopy(model)
        if recipe is not None:
            mixprec.convert(cast, recipe)
        mixprec.cast_parameters(cast, dtype)
        assert (losses(cast) - exact).abs() < bound
        mixprec.cast_parameters(cast, torch.float32)
        cast.zero_grad()
        assert (losses(cast) - exact).abs() < bound, "and back"
        floats = [t for t in (*cast.parameters(), *cast.buffers()) if t.is_floating_point()]
        assert {t.dtype for t in floats} == {torch.float32}


@pytest.mark.parametrize("entry", _TRANSFORMERS)
def test_every_known_cast_is_in_transformers(entry: str) -> None:
    """the norms and buffers that are cast with the rest are where they are looked for"""
    where, name = entry.split("/")
    module = importlib.import_module(f"transformers.models.{where}.modeling_{where}")
    kind = getattr(module, name)
    with torch.device("meta"):
        if holds := HOLDERS.get(entry, HOLDERS.get(where)):
            holder = getattr(transformers, holds)
            model = holder(holder.config_class())
        else:
            config = transformers.AutoConfig.for_model(MODEL_TYPES.get(where, where))
            try:
                model = transformers.AutoModel.from_config(config)
            except ImportError as error:
                pytest.skip(f"transformers cannot make {where}: {error}")
    owners = [m for m in model.modules() if isinstance(m, kind)]
    assert owners
    for part in _TRANSFORMERS[entry].split():
        found = [_part(owner, part) for owner in owners]
        assert any(isinstance(each, (torch.nn.Module, torch.Tensor)) for each in found)


def detr() -> Any:
    """Its frozen batch norms are buffers."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {**SEQ2SEQ, "num_queries": 5, "dropout": 0.0, "vocab_size": None}
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, **sizes,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def vera() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = transformers.LlamaConfig(**WIDTH, **HEADS, intermediate_size=48, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.VeraConfig(r=4, target_modules=["q_proj"]))


@pytest.mark.parametrize("make", [detr, vera])
def test_frozen_norms_and_adapters_with_buffers(make: Any) -> None:
    """the loss of DETR, and of VeRA of peft, is that of `.bfloat16()`"""
    torch.manual_seed(0)
    model = make()
    image, tokens = torch.randn(1, 3, 64, 64).bfloat16(), torch.arange(24).reshape(2, 12) + 3

    def loss(model: Any) -> torch.Tensor:
        if make is vera:
            return model(input_ids=tokens, labels=tokens).loss
        return model(pixel_values=image).logits.float().square().mean()

    want = loss(copy.deepcopy(model).bfloat16())
    for recipe in (None, "bf16"):
        cast = copy.deepcopy(model)
        if recipe is not None:
            mixprec.convert(cast, recipe)
        got = loss(mixprec.cast_parameters(cast, torch.bfloat16))
        got.backward()
        assert abs(got - want) < 0.02 * want
        assert {b.dtype for n, b in cast.named_buffers() if "running" in n} <= {torch.float32}
