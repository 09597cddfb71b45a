"""The norms that can run as a part of the layers behind them, and classes derived for that."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from .._local_gradients import LOW_PRECISION

__all__ = ["NormParts", "Swapped", "as_input", "names_in_forward", "norm_of"]

# What a norm's own forward may name if all it does is torch's layer_norm or rms_norm.
_OF_A_NORM = frozenset(
    ("F", "torch", "nn", "functional", "layer_norm", "rms_norm", "normalized_shape", "weight")
) | {"bias", "eps", "to", "dtype", "float", "type_as"}
# The forward of the RMSNorm of transformers' Llama, Mistral, Qwen2 and Qwen3.
_OF_LLAMA = (
    "dtype",
    "to",
    "torch",
    "float32",
    "pow",
    "mean",
    "rsqrt",
    "variance_epsilon",
    "weight",
)


class Swapped(nn.Module):
    """A module whose class `convert(fuse=True)` has replaced by one derived from it."""

    part: Any

    def alone(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class."""
        return super().forward(*args, **kwargs)


class NormParts(NamedTuple):
    eps: float | None  # None: that of the input's dtype
    subtract_mean: bool
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The names in the forward pass of the module's own class, in the order of their first use."""
    kind = type(module)
    kind = kind.__bases__[1] if issubclass(kind, Swapped) else kind
    return inspect.unwrap(kind.forward).__code__.co_names


def norm_of(module: nn.Module) -> NormParts | None:
    """The settings of a LayerNorm or RMSNorm over the last dimension; None for anything else."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        names, torchs = names_in_forward(module), ("layer_norm", "rms_norm")
        one = set(torchs) & set(names)
        if len(module.normalized_shape) != 1 or not one or not _OF_A_NORM.issuperset(names):
            return None
        return NormParts(
            module.eps,
            isinstance(module, nn.LayerNorm),
            module.weight,
            getattr(module, "bias", None),
        )
    if names_in_forward(module) == _OF_LLAMA:
        return NormParts(module.variance_epsilon, False, module.weight, None)  # type: ignore[arg-type]
    return None


def as_input(module: nn.Module, inputs: tuple[object, ...], output: object) -> object:
    """A forward hook: the output in the dtype of the input, where that has 16 bits."""
    x = next((i for i in inputs if isinstance(i, torch.Tensor)), None)
    if x is None or x.dtype not in LOW_PRECISION or not isinstance(output, torch.Tensor):
        return output
    return output.to(x.dtype)
