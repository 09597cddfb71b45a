"""Single norms and activations in one pass, where that is faster than the modules' own."""

from __future__ import annotations

from typing import Any

import torch

from .._modes import is_watched
from ..functional._derivatives import apply, is_twice_differentiable
from ..functional._one_pass import Activation, RowNorm
from ..ops._dispatch import autocast, checks
from . import _region
from ._fused import PLAIN, activation_of, fits_norm, norm_of
from ._fused_forward import FusedForward
from .known import NormSpec, Spec

# On a CPU, 1,024 rows of 512 to 2,048, forward and backward: torch's RMSNorm takes 2.5 to 6 times
# our time and its gelu_tanh 2 to 3 times; LayerNorm, GELU and SiLU 0.5 to 1.15 times, and are one
# pass already.
_KINDS = ("gelu_tanh",)


class FusedNorm(FusedForward):
    """An RMSNorm in one pass."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        spec = norm_of(self.module)
        if spec is None or not fits_norm(x, spec) or not _is_one_pass(x):
            return self.unfused(*args, **kwargs)
        dtype = x.dtype
        if spec.promote and spec.weight is not None:
            dtype = torch.promote_types(dtype, spec.weight.dtype)
        with _region.without_modes():
            settings = spec.weight, spec.bias, spec.eps, spec.subtract_mean
            return apply("norm", RowNorm, x, *settings, dtype)


class FusedActivation(FusedForward):
    """An activation in one pass."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        kind = activation_of(self.module)
        if kind not in _KINDS or type(x) not in PLAIN or not _is_one_pass(x):
            return self.unfused(*args, **kwargs)
        with _region.without_modes():
            return apply("gelu", Activation, x, kind)


def one_pass_class(spec: Spec | None) -> type[FusedForward] | None:
    """The class for a module that computes `spec`; None if it is to stay as it is."""
    if isinstance(spec, NormSpec) and not spec.subtract_mean:
        return FusedNorm
    return FusedActivation if spec in _KINDS else None


def _is_one_pass(x: torch.Tensor) -> bool:
    """Whether a module runs as one function of x here; else as its own class does."""
    return (
        x.dtype in checks.FLOATS
        and x.dim() > 0
        and x.layout is torch.strided
        and not x.is_nested
        # In a region norms and powers are FP32; in torch.autocast as well, but not on a CPU.
        and _region.current_region() is None
        and not _region.is_for_onnx()
        and (x.is_cpu or not autocast.is_on(x.device.type))
        and not is_twice_differentiable()
        and not is_watched()
        and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
    )
