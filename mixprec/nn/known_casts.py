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
from .known import NORM_CONTENTS

# Of classes that own nothing but the weights of a norm, as buffers if they are frozen: the content,
# and how many classes of transformers 5.24 have it. (Those that derive from torch's norms need no
# entry.)
_CONTENTS = {
    *NORM_CONTENTS,
    "8e762398f1357182",  # (x - running_mean) / sqrt(running_var + 1e-5) * weight + bias: 14
    # weight * (x / sqrt(mean(x^2) + eps)), the product in FP32: 11, 8 of them with a weight or
    # without, 3 with the weight cast to FP32, 2 with the other name of eps
    "3d0c05b2d5ff9cf2",
    "ff7a868b40822cd5",
    "c6273382108d1cb6",
    "0990a3d68eb3dd3b",
    "fea6aaad86af1bcd",  # the same, in the dtype of the weight: 10
    # the same, of x * silu(gate) in groups: 5; times an activation of the gate: 5 and 3
    "85c0f346c4a2b02c",
    "f98fe809a745bd4f",
    "6c2a71d6e4675fda",
    "6182feb777da1c02",  # (x - mean(x)) / sqrt(var(x) + eps) * weight: 4
}
# Of which there is one class alone: transformers.models.NAME.modeling_NAME as NAME/Class, or
# NAME/FILE/Class where the file has another name.
_CLASSES = """
cpmant/CpmAntLayerNorm deberta/DebertaLayerNorm esm/esmfold/EsmFoldLayerNorm
falcon_h1/FalconH1RMSNormGated gemma3n/Gemma3nAudioCumulativeGroupNorm
gradium_phonon_tts/GradiumPhononTTSTimestepNorm imagegpt/ImageGPTLayerNorm llama4/Llama4TextRMSNorm
mobilebert/NoNorm moonshine_streaming/MoonshineStreamingLayerNorm
muse_spark/MuseSparkTextCenteredRMSNorm muse_spark/MuseSparkTextInputScaledRMSNorm
phi4_multimodal/Phi4MultimodalAudioMeanVarianceNormLayer pocket_tts/PocketTTSTimestepNorm
qwen4_exp/Qwen4ExpTextRMSNorm vitdet/VitDetLayerNorm zaya/ZayaQKNorm
"""


def known_norms(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of the modules of `model` that are such norms, or derived from one."""
    places = [("torchvision.ops.misc", "FrozenBatchNorm2d")]
    for entry in _CLASSES.split():
        *where, name = entry.split("/")
        places.append((f"transformers.models.{where[0]}.modeling_{where[-1]}", name))
    named = {imported_class(*place) for place in places}

    def is_norm(kind: type) -> bool:
        return kind in named or content_of(kind).digest in _CONTENTS

    return tuple(k for k in {type(m) for m in model.modules()} if any(map(is_norm, k.__mro__)))


def as_input(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
) -> object:
    """A forward hook: the output, or each of a tuple, in the dtype of the input, where that has 16
    bits."""
    x = next((i for i in (*args, *kwargs.values()) if isinstance(i, torch.Tensor)), None)
    if x is None or x.dtype not in LOW_PRECISION:
        return output
    if type(output) is tuple:
        return tuple(as_input(module, (x,), {}, each) for each in output)
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output.to(x.dtype)
    return output


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
                found = _part(module, name)
                if isinstance(found, nn.Module):
                    parameters.update(found.parameters(recurse=False))
                elif isinstance(found, torch.Tensor):
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
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


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
