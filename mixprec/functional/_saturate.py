"""Saturation of fp16 outputs, for recipes with clip_activations."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import FP16
from ..recipes import Recipe


class _Saturate(torch.autograd.Function):
    """fp16(y) for y in FP32, with +-65504 where a finite y would become Inf."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, clipped: torch.Tensor | None) -> torch.Tensor:
        rounded = y.to(torch.float16)
        over = rounded.isinf() & y.isfinite()
        ctx.save_for_backward(over)
        if clipped is not None:
            clipped.add_(over.sum())  # on the device: no host sync
        return torch.where(over, rounded.clamp(-FP16.max, FP16.max), rounded)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (over,) = ctx.saved_tensors
        return g.masked_fill(over, 0.0), None


def clips(recipe: Recipe, out_dtype: torch.dtype) -> bool:
    """Whether the output is computed in FP32 first, to be saturated."""
    return recipe.clip_activations and out_dtype == torch.float16


def saturate(y: torch.Tensor, clipped: torch.Tensor | None) -> torch.Tensor:
    """y (fp32) in fp16, rounded once: finite values beyond the largest, 65504, become +-65504 and
    are counted in `clipped` (int64 []); Inf and NaN stay. The gradient is 0 where it was clipped.
    """
    return _Saturate.apply(y, clipped)
