"""Models by config with random weights: one of each family, for models.py.

Sizes keep the proportions of published models: width 128, an MLP of 3 to 4 times that, two layers,
a vocabulary of 512. `make(name, seed)` returns a model, with a batch that it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
HEAD = {**GROUPED, "head_dim": 32}
EXPERTS = {**HEAD, "num_experts_per_tok": 2}
CODER = {
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 384,
    "decoder_ffn_dim": 384,
}  # fmt: skip
IMAGE = {"image_size": 64, "num_labels": 10}
PATCHES = {**SIZES, **IMAGE, "patch_size": 8}
STAGES = {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1], "num_labels": 10}
ENCODER = {**SIZES, "intermediate_size": 512}


def text() -> Batch:
    tokens = torch.randint(3, 512, (4, 64))
    return {"input_ids": tokens, "labels": tokens}


def images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(10, (4,))}


def mels() -> Batch:
    return {"input_features": torch.randn(2, 80, 128), "labels": torch.randint(3, 512, (2, 32))}


def sound() -> Batch:
    return {"input_values": torch.randn(2, 2000), "labels": torch.randint(3, 512, (2, 8))}


def pairs() -> Batch:
    ids, pixels = torch.randint(3, 512, (4, 32)), torch.randn(4, 3, 64, 64)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


# The class of transformers, what its config has beside SIZES, and the batch.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, text),
    "Mistral": ("MistralForCausalLM", GROUPED, text),
    "Qwen3": ("Qwen3ForCausalLM", HEAD, text),
    "Gemma 2": ("Gemma2ForCausalLM", HEAD, text),
    "Phi-3": ("Phi3ForCausalLM", {}, text),
    "OLMo 2": ("Olmo2ForCausalLM", GROUPED, text),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 128, "n_layer": 2, "n_head": 4}, text),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}, text),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 512, "word_embed_proj_dim": 128}, text),
    "Bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 2}, text),
    "Falcon": ("FalconForCausalLM", {"new_decoder_architecture": False}, text),
    "Mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, text),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM",
                  {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 192}, text),
    "gpt-oss": ("GptOssForCausalLM",
                {**EXPERTS, "num_local_experts": 4, "intermediate_size": 192,
                 "layer_types": ["sliding_attention", "full_attention"]}, text),
    "Llama 4": ("Llama4ForCausalLM",
                {**EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 384,
                 "num_experts_per_tok": 1}, text),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM",
                    {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
                     "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
                     "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 192,
                     "first_k_dense_replace": 1}, text),
    "Mamba": ("MambaForCausalLM", {"state_size": 16, "expand": 2}, text),
    "BERT": ("BertForMaskedLM", {}, text),
    "RoBERTa": ("RobertaForMaskedLM", {}, text),
    "DeBERTa v2": ("DebertaV2ForMaskedLM",
                   {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                    "position_buckets": 32}, text),
    "ModernBERT": ("ModernBertForMaskedLM", {"cls_token_id": 1, "sep_token_id": 2}, text),
    "T5": ("T5ForConditionalGeneration",
           {"d_model": 128, "d_kv": 32, "d_ff": 384, "num_heads": 4, "decoder_start_token_id": 1},
           text),
    "BART": ("BartForConditionalGeneration", CODER, text),
    "Whisper": ("WhisperForConditionalGeneration", {**CODER, "max_source_positions": 64}, mels),
    "Wav2Vec2": ("Wav2Vec2ForCTC",
                 {"conv_dim": [64] * 4, "conv_kernel": [10, 3, 3, 2],
                  "conv_stride": [5, 2, 2, 2], "num_feat_extract_layers": 4,
                  "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
                  "mask_time_prob": 0.0}, sound),
    "CLIP": ("CLIPModel",
             {"text_config": ENCODER, "projection_dim": 64,
              "vision_config": {**ENCODER, "image_size": 64, "patch_size": 8}}, pairs),
    "ViT": ("ViTForImageClassification", PATCHES, images),
    "DINOv2": ("Dinov2ForImageClassification", PATCHES, images),
    "Swin": ("SwinForImageClassification",
             {**IMAGE, "patch_size": 4, "embed_dim": 48, "depths": [1, 1], "num_heads": [2, 4],
              "window_size": 4}, images),
    "ConvNeXt": ("ConvNextForImageClassification", STAGES, images),
    "ResNet": ("ResNetForImageClassification",
               {**STAGES, "embedding_size": 32, "layer_type": "bottleneck"}, images),
    "EfficientNet": ("EfficientNetForImageClassification",
                     {**IMAGE, "width_coefficient": 0.5, "depth_coefficient": 0.3,
                      "hidden_dim": 640}, images),
    "SegFormer": ("SegformerForImageClassification",
                  {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_labels": 10,
                   "num_attention_heads": [1, 2, 4, 4]}, images),
}  # fmt: skip


def _of_transformers(name: str) -> tuple[nn.Module, Batch]:
    import transformers

    kind, more, batch = TRANSFORMERS[name]
    cls = getattr(transformers, kind)
    known = SIZES if batch in (text, mels, sound) else {}
    return cls(cls.config_class(**{**known, **more})), batch()


def _of_diffusers(name: str) -> tuple[nn.Module, Batch]:
    import diffusers

    at, blocks = torch.tensor([30]), {"block_out_channels": (32, 64), "norm_num_groups": 8}
    image, channels = torch.randn(2, 4, 16, 16), {"in_channels": 4, "out_channels": 4}
    if name == "U-Net":
        model = diffusers.UNet2DConditionModel(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=64,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1,
            attention_head_dim=8, sample_size=16, **blocks, **channels,
        )  # fmt: skip
        text = torch.randn(2, 8, 64)
        return model, {"sample": image, "timestep": at, "encoder_hidden_states": text}
    if name == "AutoencoderKL":
        model = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            sample_size=16, **blocks, **channels,
        )  # fmt: skip
        return model, {"sample": image}
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=8, dropout=0.0,
    )  # fmt: skip
    return model, {"hidden_states": image, "timestep": at, "class_labels": torch.tensor([1, 2])}


MAKERS: dict[str, Callable[[str], tuple[nn.Module, Batch]]] = {
    **dict.fromkeys(TRANSFORMERS, _of_transformers),
    **dict.fromkeys(("U-Net", "AutoencoderKL", "DiT"), _of_diffusers),
}


def make(name: str, seed: int) -> tuple[nn.Module, Batch]:
    """A model in training mode, without dropout, and its batch, from this seed."""
    torch.manual_seed(seed)
    model, batch = MAKERS[name](name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train(), batch


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    """The loss that a model returns; of a diffusion model, the mean square of the error of its
    sample against the input."""
    if isinstance(output, torch.Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    image = batch["sample"] if "sample" in batch else batch["hidden_states"]
    sample = getattr(output, "sample", output)[:, :4]
    return (sample.float() - image).square().mean()
