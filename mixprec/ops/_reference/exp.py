"""exp in FP32 by additions, multiplications and shifts only: the same bits as csrc/math/exp.h."""

from __future__ import annotations

import torch

_SHIFT = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
_Q = [
    float.fromhex(x)
    for x in ["0x1.6d4328p-10", "0x1.120b74p-7", "0x1.5554eap-5", "0x1.5554dcp-3", "0x1p-1"]
]


def exp_fp32(x: torch.Tensor) -> torch.Tensor:
    """e^x of an FP32 tensor; NaN stays."""
    t = torch.where(x > 89.0, 89.0, x)
    t = torch.where(t < -104.0, -104.0, t)
    n = t * 1.44269504 + _SHIFT
    whole = n.view(torch.int32) - 0x4B400000
    n = n - _SHIFT
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    q = torch.full_like(r, _Q[0])
    for coefficient in _Q[1:]:
        q = q * r + coefficient
    y = (q * (r * r) + r) + 1.0
    half = whole >> 1
    for power in (half, whole - half):
        y = y * ((power + 127) << 23).view(torch.float32)
    return torch.where(torch.isnan(x), x, y)
