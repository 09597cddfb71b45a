"""What other libraries' classes need in the dtype of their weights, known by the identity of these
classes: norms and buffers that `mixprec.cast_parameters` would leave in FP32 elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from .imported import imported_class

# transformers.models.NAME.modeling_NAME as NAME/Class, of transformers 5.24. Norms: the class casts
# what it computes on to the dtype of this norm's weight, and other layers take it from there.
# Buffers: the class computes with them and with 16-bit tensors, in products of one dtype.
_TRANSFORMERS = {
    "blip_2/Blip2QFormerModel": "layernorm",
    "falcon_mamba/FalconMambaBlock": "norm",
    "fun_asr_nano/FunAsrNanoEncoder": "layers.0.input_layernorm",
    "gemma4/Gemma4AudioLayer": "norm_pre_attn",
    "instructblip/InstructBlipQFormerEmbeddings": "layernorm",
    "instructblipvideo/InstructBlipVideoQFormerEmbeddings": "layernorm",
    "kosmos2/Kosmos2TextSinusoidalPositionalEmbedding": "weights",
    "kosmos2_5/Kosmos2_5TextSinusoidalPositionalEmbedding": "weights",
    "m2m_100/M2M100SinusoidalPositionalEmbedding": "weights",
    "mamba/MambaBlock": "norm",
    "mamba2/Mamba2Block": "norm",
    "minimax/MiniMaxLightningAttention": "slope_rate query_decay key_decay diagonal_decay",
    "minimax_m3_vl/MiniMaxM3VLVisionModel": "pre_layrnorm",
    "musicgen/MusicgenSinusoidalPositionalEmbedding": "weights",
    "musicgen_melody/MusicgenMelodySinusoidalPositionalEmbedding": "weights",
    "nemotron_h/NemotronHBlock": "norm",
    "neomme/NeoMMEPatchEmbeddings": "norm",
    "nllb_moe/NllbMoeSinusoidalPositionalEmbedding": "weights",
    "openai/Attention": "bias",
    "seamless_m4t/SeamlessM4TSinusoidalPositionalEmbedding": "weights",
    "seamless_m4t_v2/SeamlessM4Tv2ConformerFeatureProjection": "layer_norm",
    "seamless_m4t_v2/SeamlessM4Tv2SinusoidalPositionalEmbedding": "weights",
    "speech_to_text/Speech2TextSinusoidalPositionalEmbedding": "weights",
    "speecht5/SpeechT5SinusoidalPositionalEmbedding": "weights",
    "xglm/XGLMSinusoidalPositionalEmbedding": "weights",
    "zaya/ZayaDecoderLayer": "input_layernorm post_attention_layernorm",
    "zaya/ZayaModel": "norm",
}


def known_casts(model: nn.Module) -> tuple[set[nn.Parameter], set[str]]:
    """The parameters of such norms, and the names of such buffers."""
    parts: dict[type[nn.Module], list[str]] = {}
    for entry, names in _TRANSFORMERS.items():
        where, name = entry.split("/")
        kind = imported_class(f"transformers.models.{where}.modeling_{where}", name)
        if kind is not None:
            parts[kind] = names.split()
    parameters: set[nn.Parameter] = set()
    buffers: set[str] = set()
    for fqn, module in model.named_modules():
        for kind in (kind for kind in parts if isinstance(module, kind)):
            for part in parts[kind]:
                found = _part(module, part)
                if isinstance(found, nn.Module):
                    parameters.update(found.parameters(recurse=False))
                elif isinstance(found, torch.Tensor):
                    buffers.add(f"{fqn}.{part}".lstrip("."))
    return parameters, buffers


def _part(module: nn.Module, path: str) -> object:
    """None where another version has no such part."""
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
