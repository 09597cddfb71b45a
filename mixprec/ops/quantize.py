"""quantize: a tensor to FP8, FP16 or BF16, with its scale, amax and, if asked, transpose."""

from __future__ import annotations

import torch

from .. import formats
from ..quantized import Quantized
from . import _backends, _checks, _library
from .amax import amax_reference
from .scale import scale_from_amax

_FP8_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
_FP8_INF = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def cast_reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cast(x.float() * scale): one FP32 multiply, one rounding to nearest, ties to even.

    FP8: a finite x saturates to the format's maximum, also where x * scale is infinite; NaN stays
    NaN, Inf becomes NaN in E4M3 and Inf in E5M2. FP16 and BF16: IEEE, overflow gives Inf.
    """
    wide = x.float()
    scaled = wide * scale
    if dtype not in _checks.FP8:
        return scaled.to(dtype)
    fmt = formats.parse(dtype)
    code = scaled.clamp(-fmt.max, fmt.max).to(dtype).view(torch.uint8)
    sign = torch.signbit(wide).to(torch.uint8) << 7
    code = torch.where(torch.isinf(wide), sign | _FP8_INF[dtype], code)
    code = torch.where(torch.isnan(wide) | torch.isnan(scaled), sign | _FP8_NAN[dtype], code)
    return code.view(dtype)


def quantize_reference(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    power_of_two_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    amax = amax_reference(x)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    if scale is None:
        current = dtype in _checks.FP8
        fmt_max = formats.parse(dtype).max
        scale = scale_from_amax(amax, fmt_max, 0, power_of_two_scale, one) if current else one
    scale = scale.reshape(())
    data = cast_reference(x, scale, dtype).contiguous()
    if transpose:
        data_t = data.reshape(_rows(x), x.shape[-1]).t().contiguous()
    else:
        data_t = data.new_empty((0, 0))
    return data, data_t, 1.0 / scale, amax


def _rows(x: torch.Tensor) -> int:
    """M of x seen as [M, K]: the product of all dimensions but the last."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def _fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    power_of_two_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape_t = (x.shape[-1], _rows(x)) if transpose else (0, 0)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(shape_t, dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
    )


def _check(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    power_of_two_scale: bool,
) -> None:
    op = "quantize"
    formats.parse(dtype, who=op)
    _checks.is_tensor(op, "x", x)
    _checks.has_dtype(op, "x", x, _checks.FLOATS)
    if scale is not None:
        _checks.is_scalar(op, "scale", scale, torch.float32)
        _checks.on_device(op, "scale", scale, x.device, "x")
    if transpose and x.dim() < 2:
        raise ValueError(f"{op}: transpose needs x of 2 or more dimensions, got {tuple(x.shape)}")


_library.define(
    "quantize",
    "(Tensor x, ScalarType dtype, Tensor? scale, bool transpose, bool power_of_two_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    reference=quantize_reference,
    fake=_fake,
)


def quantize(
    x: torch.Tensor,
    fmt: formats.Format | str | torch.dtype,
    scale: float | torch.Tensor | None = None,
    transpose: bool = False,
    granularity: str = "tensor",
    power_of_two_scale: bool = True,
) -> Quantized:
    """Cast x to `fmt`: data = saturate(x * scale), so that x ~ data * scale_inv.

    x: any shape and strides, fp32, bf16 or fp16. fmt: E4M3, E5M2, FP16 or BF16 (a Format, its
    name or its torch dtype). scale: the multiplier before the cast, fp32 with one element (a
    number is accepted); None takes fmt.max / amax, rounded down to a power of two unless
    power_of_two_scale is False (for FP16 and BF16, and where amax is 0 or not finite: 1). The
    amax returned is that of x, from the same pass. transpose also returns data_t [K, M] of x seen
    as [M, K]. granularity: "tensor", one scale for all of x.

    Rounding is to nearest, ties to even. In FP8 finite values saturate and NaN and Inf stay
    visible (Inf is NaN in E4M3); FP16 and BF16 overflow to Inf as IEEE 754 says.
    Source: FP8 Formats for Deep Learning (Micikevicius et al., 2022).
    """
    op = "quantize"
    parsed = formats.parse(fmt, who=op)
    _checks.is_tensor(op, "x", x)
    _checks.needs_no_grad(op, "use mixprec.functional.linear or matmul, or x.detach()", x)
    if granularity != "tensor":
        raise ValueError(f'{op}: granularity must be "tensor", got {granularity!r}')
    scale = _checks.positive_scale(op, "scale", scale, x.device)
    args = (x, parsed.dtype, scale, transpose, power_of_two_scale)
    data, data_t, scale_inv, amax = _backends.call(op, x.device.type, *args)
    return Quantized(
        data, scale_inv, amax, data_t if transpose else None, None, parsed, granularity
    )
