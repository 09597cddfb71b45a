"""INT8 with one scale per row, for weights in inference."""

from __future__ import annotations

import torch

from ._dispatch import checks

_MAX = 127.0  # -128 is not used: the codes are symmetric


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data int8 [N, K], scale_inv fp32 [N, 1]) with w ~ data * scale_inv.

    w: [N, K], fp32, bf16 or fp16. scale = 127 / amax of a row (1 where the row is zero), one FP32
    division; data = w * scale rounded to nearest, ties to even; scale_inv = 1 / scale. Plain torch:
    it runs once per exported weight. ValueError where w is not 2-D or not finite: INT8 has no code
    for Inf or NaN.
    """
    op = "quantize_int8"
    checks.has_dtype(op, "w", w, checks.FLOATS)
    if w.dim() != 2:
        raise ValueError(f"{op}: w must be [N, K], got shape {tuple(w.shape)}")
    wide = w.detach().float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(f"{op}: w must be finite, got Inf or NaN")
    amax = wide.abs().amax(dim=1, keepdim=True) if w.shape[1] else wide.new_zeros(len(w), 1)
    # 127 / amax is Inf for a very small amax: the scale is clamped so that its inverse is normal.
    scale = torch.where(amax == 0, 1.0, _MAX / amax).clamp(max=2.0**126)
    data = (wide * scale).round().clamp(-_MAX, _MAX).to(torch.int8)
    return data, 1.0 / scale


def dequantize_int8(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """data int8 [N, K] * scale_inv [N, 1], multiplied in FP32 and rounded once to `dtype`."""
    return (data.float() * scale_inv).to(dtype)
