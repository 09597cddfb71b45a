"""What classes of transformers compute, for `mixprec.convert(fuse=True)`: norms, activations, MLPs.

`mixprec.nn` imports this when transformers has been imported. A class is known if it is the one
that its module of transformers defines, with all of its methods, in a version that the tests of
this table have run with (tests/integrations/test_fused_families.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ..nn.known import MLPSpec, NormSpec, Spec, register_fusion

__all__ = ["CLASSES", "VERSIONS", "register"]

VERSIONS = ("5.23", "5.24")


def _rms_norm(m: Any) -> NormSpec:
    """weight * (x / sqrt(mean(x^2) + eps)), where the weight may be FP32 beside 16 bits."""
    return NormSpec(m.weight.shape[0], m.variance_epsilon, m.weight, promote=True)


def _gemma_norm(m: Any) -> NormSpec | None:
    """(1 + weight) * (x / sqrt(mean(x^2) + eps)), in the dtype of x."""
    if "_norm" in vars(m):
        return None
    return NormSpec(m.weight.shape[0], m.eps, 1.0 + m.weight.float())


def _gated(m: Any) -> MLPSpec:
    return MLPSpec((m.gate_proj, m.up_proj), m.act_fn, m.down_proj)


def _gpt2(m: Any) -> MLPSpec:
    return MLPSpec((m.c_fc,), m.act, m.c_proj, after=m.dropout)


def _phi(m: Any) -> MLPSpec:
    return MLPSpec((m.fc1,), m.activation_fn, m.fc2)


def _gelu(m: Any) -> str | None:
    return "gelu" if m.act is nn.functional.gelu else None


def _gelu_tanh(m: Any) -> str | None:
    act = m.act
    known = isinstance(act, functools.partial) and act.func is nn.functional.gelu and not act.args
    return "gelu_tanh" if known and act.keywords == {"approximate": "tanh"} else None


# By module of transformers.
CLASSES: dict[str, dict[str, Callable[[Any], Spec | None]]] = {
    "activations": {
        "SiLUActivation": lambda m: "silu",
        "GELUActivation": _gelu,
        "GELUTanh": _gelu_tanh,
        "NewGELUActivation": lambda m: "gelu_tanh",
        "ReLUSquaredActivation": lambda m: "relu2",
    },
    "models.llama.modeling_llama": {"LlamaRMSNorm": _rms_norm, "LlamaMLP": _gated},
    "models.mistral.modeling_mistral": {"MistralRMSNorm": _rms_norm, "MistralMLP": _gated},
    "models.qwen2.modeling_qwen2": {"Qwen2RMSNorm": _rms_norm, "Qwen2MLP": _gated},
    "models.qwen3.modeling_qwen3": {"Qwen3RMSNorm": _rms_norm, "Qwen3MLP": _gated},
    "models.gemma.modeling_gemma": {"GemmaRMSNorm": _gemma_norm, "GemmaMLP": _gated},
    "models.gemma2.modeling_gemma2": {"Gemma2RMSNorm": _gemma_norm, "Gemma2MLP": _gated},
    "models.gemma3.modeling_gemma3": {"Gemma3RMSNorm": _gemma_norm, "Gemma3MLP": _gated},
    "models.phi.modeling_phi": {"PhiMLP": _phi},
    "models.phi3.modeling_phi3": {"Phi3RMSNorm": _rms_norm},
    "models.gpt2.modeling_gpt2": {"GPT2MLP": _gpt2},
}


def register() -> None:
    """Register the classes of the modules that have been imported since the last call."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        return
    for path, classes in CLASSES.items():
        module = sys.modules.get(f"transformers.{path}")
        if module is None:
            continue
        for name, describe in classes.items():
            kind: Any = vars(module).get(name)
            if _is_defined_by(kind, module):
                register_fusion(kind, describe)


def _is_defined_by(kind: Any, module: ModuleType) -> bool:
    """Whether no other library has replaced the class or one of its methods."""
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return False
    methods = [m for m in vars(kind).values() if isinstance(m, FunctionType)]
    own = all(m.__globals__ is vars(module) for m in methods)
    return own and kind.__bases__ == (nn.Module,) and "forward" in vars(kind)
