"""What classes of torch and other libraries need in the dtype of their weights, known by identity:
norms and buffers that `mixprec.cast_parameters` would leave in FP32 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm

from .._local_gradients import LOW_PRECISION
from ._content import content_of, imported_class

# transformers.models.NAME.modeling_NAME as NAME/Class, of transformers 5.24. Norms: the class casts
# what it computes on to the dtype of this norm's weight, and other layers take it from there.
# Buffers: the class computes with them and with 16-bit tensors, in products of one dtype.
_TRANSFORMERS = {
    "blip_2/Blip2QFormerModel": "layernorm",
    "bros/BrosPositionalEmbedding1D": "inv_freq",
    "canary/CanaryPositionalEmbedding": "positional_embedding",
    "edgetam/EdgeTamPositionalEmbedding": "positional_embedding",
    "edgetam_video/EdgeTamVideoPositionalEmbedding": "positional_embedding",
    "falcon_mamba/FalconMambaBlock": "norm",
    "fastspeech2_conformer/FastSpeech2ConformerHifiGan": "mean scale",
    "florence2/Florence2VisionPositionalEmbeddingCosine1D": "pos_idx_to_embed",
    "fun_asr_nano/FunAsrNanoEncoder": "layers.0.input_layernorm",
    "fun_asr_nano/FunAsrNanoPositionEmbedding": "positional_embedding",
    "gemma4/Gemma4AudioLayer": "norm_pre_attn",
    "instructblip/InstructBlipQFormerEmbeddings": "layernorm",
    "instructblipvideo/InstructBlipVideoQFormerEmbeddings": "layernorm",
    "kimi_k25/Kimi_K25VisionPositionEmbeddings": "time_position_embeddings",
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
    "pp_doclayout_v4/PPDocLayoutV4GlobalPointer": "eye",
    "qwen2_5_omni/Qwen2_5OmniDownSample1d": "filter",
    "qwen2_5_omni/Qwen2_5OmniUpSample1d": "filter",
    "qwen2_5_omni/SinusoidsPositionEmbedding": "positional_embedding",
    "qwen3_asr/SinusoidsPositionEmbedding": "positional_embedding",
    "qwen3_omni_moe/SinusoidsPositionEmbedding": "positional_embedding",
    "sam2/Sam2PositionalEmbedding": "positional_embedding",
    "sam2_video/Sam2VideoPositionalEmbedding": "positional_embedding",
    "sam3_tracker/Sam3TrackerPositionalEmbedding": "positional_embedding",
    "sam3_tracker_video/Sam3TrackerVideoPositionalEmbedding": "positional_embedding",
    "seamless_m4t/SeamlessM4TSinusoidalPositionalEmbedding": "weights",
    "seamless_m4t_v2/SeamlessM4Tv2ConformerFeatureProjection": "layer_norm",
    "seamless_m4t_v2/SeamlessM4Tv2SinusoidalPositionalEmbedding": "weights",
    "speech_to_text/Speech2TextSinusoidalPositionalEmbedding": "weights",
    "speecht5/SpeechT5HifiGan": "mean scale",
    "speecht5/SpeechT5ScaledPositionalEncoding": "pe",
    "speecht5/SpeechT5SinusoidalPositionalEmbedding": "weights",
    "swin2sr/Swin2SRSelfAttention": "relative_coords_table",
    "swinv2/Swinv2SelfAttention": "relative_coords_table",
    "xglm/XGLMSinusoidalPositionalEmbedding": "weights",
    "zaya/ZayaDecoderLayer": "input_layernorm post_attention_layernorm",
    "zaya/ZayaModel": "norm",
}
# Buffers of others, by the module of the class and its name; "*": all of them.
_OTHERS = {
    "torch.nn.utils.parametrizations/_SpectralNorm": "_u _v",
    "torchvision.models.swin_transformer/ShiftedWindowAttentionV2": "relative_coords_table",
    "peft.tuners._buffer_dict/BufferDict": "*",  # of VeRA and others
}
# The content of the wrapper of transformers' dynamic_rope_update.
_ROPE_UPDATE = "ed04181d4dddb7e9"
# Losses of torch whose class weights must have the dtype of their input.
_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)


def known_casts(model: nn.Module) -> tuple[set[nn.Parameter], set[str]]:
    """The parameters of such norms, and the names of such buffers."""
    parts: dict[type[nn.Module], list[str]] = {}
    for entry, names in (*_TRANSFORMERS.items(), *_OTHERS.items()):
        where, name = entry.split("/")
        path = where if entry in _OTHERS else f"transformers.models.{where}.modeling_{where}"
        kind = imported_class(path, name)
        if kind is not None:
            parts[kind] = names.split()
    parameters: set[nn.Parameter] = set()
    buffers: set[str] = set()
    for fqn, module in model.named_modules():
        known = [part for kind in parts if isinstance(module, kind) for part in parts[kind]]
        for part in (*known, *_parts_of_hooks(module)):
            for name in module._buffers if part == "*" else (part,):
                part_of_module = _part(module, name)
                if isinstance(part_of_module, nn.Module):
                    parameters.update(part_of_module.parameters(recurse=False))
                elif isinstance(part_of_module, torch.Tensor):
                    buffers.add(f"{fqn}.{name}".lstrip("."))
    return parameters, buffers


def _parts_of_hooks(module: nn.Module) -> Iterator[str]:
    """The buffers that torch's hooks compute a weight with."""
    for hook in module._forward_pre_hooks.values():
        if type(hook) is SpectralNorm:
            yield from (f"{hook.name}_u", f"{hook.name}_v")
        elif isinstance(hook, prune.BasePruningMethod):
            yield f"{hook._tensor_name}_mask"


def _part(module: nn.Module, path: str) -> object:
    """None where another version has no such part."""
    part: object = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def is_weighted_loss(module: nn.Module) -> bool:
    """Whether its FP32 weights, which stay, want an input in FP32."""
    return type(module) in _LOSSES and module.weight is not None


def input_in_fp32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: 16-bit arguments in FP32."""

    def cast(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.dtype in LOW_PRECISION else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def is_rotary(module: nn.Module) -> bool:
    """Whether transformers' dynamic_rope_update decorates the forward pass of its class, whose
    cosines and sines are cast before they meet activations."""
    forward: Any = type(module).forward
    while isinstance(forward, FunctionType):
        if content_of(forward).digest == _ROPE_UPDATE:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
