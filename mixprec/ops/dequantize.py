"""dequantize: from a low-precision tensor and its scale back to fp32, bf16 or fp16."""

from __future__ import annotations

import torch

from ..quantized import Quantized
from . import _backends, _checks, _library

LOW = (*_checks.FP8, torch.float16, torch.bfloat16)


def dequantize_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """data.float() * scale_inv in FP32, then one rounding to dtype (IEEE)."""
    return (data.float() * scale_inv.reshape(())).to(dtype).contiguous()


def _fake(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.new_empty(data.shape, dtype=dtype)


def _check(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
    op = "dequantize"
    _checks.is_tensor(op, "data", data)
    _checks.has_dtype(op, "data", data, LOW)
    _checks.is_scalar(op, "scale_inv", scale_inv, torch.float32)
    _checks.on_device(op, "scale_inv", scale_inv, data.device, "data")
    if dtype not in _checks.FLOATS:
        raise ValueError(f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")


_library.define(
    "dequantize",
    "(Tensor data, Tensor scale_inv, ScalarType dtype) -> Tensor",
    check=_check,
    reference=dequantize_reference,
    fake=_fake,
)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return q.data * q.scale_inv as `dtype` (fp32, bf16 or fp16), contiguous, in q.data's shape.

    The decode is exact and the product is FP32; the only rounding is the one to `dtype`.
    """
    if not isinstance(q, Quantized):
        got = type(q).__name__
        raise TypeError(f"dequantize: q must be a Quantized (from mixprec.quantize), got {got}")
    _checks.is_tensor("dequantize", "q.data", q.data)
    _checks.needs_no_grad("dequantize", "detach q", q.data, q.scale_inv)
    return _backends.call("dequantize", q.data.device.type, q.data, q.scale_inv, dtype)
