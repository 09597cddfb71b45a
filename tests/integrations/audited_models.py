"""Small models with random weights, for tests of audit: how each is made, and its batch.

A case returns a module and the mapping of its arguments. `loss_of` makes a number of what it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Batch = dict[str, Any]
TOKENS = torch.arange(48).view(2, 24) % 90
TEXT: Batch = {"input_ids": TOKENS, "labels": TOKENS}
PIXELS = torch.linspace(-1, 1, 6 * 1024).view(2, 3, 32, 32)
IMAGES: Batch = {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])}
MELS: Batch = {"input_features": torch.linspace(-1, 1, 512).view(2, 8, 32), "labels": TOKENS}
SOUND: Batch = {"input_values": torch.linspace(-1, 1, 400).view(2, 200), "labels": TOKENS[:, 1:5]}
PAIRS: Batch = {"input_ids": TOKENS, "pixel_values": PIXELS, "return_loss": True}
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
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
ENCODER_DECODER = {
    **HEADS,
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
TWO_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
FAMILIES: dict[str, tuple[str, dict[str, Any], Batch]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, TEXT),
    "Mistral": ("MistralForCausalLM", GROUPED, TEXT),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Phi3": ("Phi3ForCausalLM", {}, TEXT),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}, TEXT),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, TEXT),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}, TEXT),
    "Bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 2}, TEXT),
    "Mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, TEXT),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32},
        TEXT,
    ),
    "Mamba": ("MambaForCausalLM", {"state_size": 4, "expand": 2}, TEXT),
    "Rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 32}, TEXT),
    "Bert": ("BertForMaskedLM", {}, TEXT),
    "Roberta": ("RobertaForMaskedLM", {}, TEXT),
    "Electra": ("ElectraForMaskedLM", {"embedding_size": 32}, TEXT),
    "Deberta": (
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        TEXT,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0},
        TEXT,
    ),
    "Bart": ("BartForConditionalGeneration", ENCODER_DECODER, TEXT),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16},
        MELS,
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {
            **{"conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "mask_time_prob": 0.0},
            "num_conv_pos_embedding_groups": 2,
        },
        SOUND,
    ),
    "CLIP": (
        "CLIPModel",
        {
            "text_config": {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 32},
            "vision_config": {**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        PAIRS,
    ),
    "ViT": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}, IMAGES),
    "ConvNext": ("ConvNextForImageClassification", {**TWO_STAGES, "num_stages": 2}, IMAGES),
    "ResNet": (
        "ResNetForImageClassification",
        {**TWO_STAGES, "embedding_size": 8, "layer_type": "basic"},
        IMAGES,
    ),
}


def of_transformers(name: str) -> tuple[nn.Module, Batch]:
    kind, more, batch = FAMILIES[name]
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**{**SIZES, **more})), batch


def of_diffusers(name: str) -> tuple[nn.Module, Batch]:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 8}
    image, at = torch.linspace(-1, 1, 256).view(1, 4, 8, 8), torch.tensor([3])
    channels = {"in_channels": 4, "out_channels": 4}
    if name == "UNet2D":
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        model = diffusers.UNet2DModel(
            down_block_types=down, up_block_types=up, attention_head_dim=4, layers_per_block=1,
            **blocks, **channels,
        )  # fmt: skip
        return model, {"sample": image, "timestep": at}
    if name == "AutoencoderKL":
        model = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            **blocks, **channels,
        )  # fmt: skip
        return model, {"sample": image}
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4, dropout=0.0,
    )  # fmt: skip
    return model, {"hidden_states": image, "timestep": at, "class_labels": torch.tensor([1])}


DIFFUSERS = ("UNet2D", "AutoencoderKL", "DiT")
MODELS: dict[str, Callable[[str], tuple[nn.Module, Batch]]] = {
    **dict.fromkeys(FAMILIES, of_transformers),
    **dict.fromkeys(DIFFUSERS, of_diffusers),
}


def make(name: str) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name](name)
    return model.train(), batch


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model computes, or the mean square of what it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    output = getattr(output, "sample", output)
    return (output[0] if isinstance(output, tuple) else output).float().square().mean()
