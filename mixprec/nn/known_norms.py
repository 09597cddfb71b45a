"""The norms of other libraries, known by their content or their class; their output in 16 bits."""

from __future__ import annotations

import torch
from torch import nn

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
