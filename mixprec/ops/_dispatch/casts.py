"""What the ops that cast share: their checks, the shapes of their results, and Quantized."""

from __future__ import annotations

import torch

from ...formats import Format, parse
from ...quantized import Quantized
from . import checks, scale_layout

# data, data_t, scale_inv, scale_inv_t, amax
Cast = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def check(
    op: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    granularity: str,
) -> None:
    """The arguments of a cast of values of x's shape."""
    scale_layout.parse(op, granularity)
    if granularity != "tensor" and dtype not in checks.FP8:
        raise ValueError(f'{op}: granularity must be "tensor" for {dtype}, got {granularity!r}')
    if scale is not None:
        checks.is_scalar(op, "scale", scale, torch.float32)
        checks.on_device(op, "scale", scale, x.device, "x")
        if granularity != "tensor":
            raise ValueError(
                f"{op}: scale must be None with granularity {granularity!r}, whose scales come "
                f"from x"
            )
    if transpose and x.dim() < 2:
        raise ValueError(f"{op}: transpose needs x of 2 or more dimensions, got {tuple(x.shape)}")


def check_fused(
    op: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    granularity: str,
) -> None:
    """As `check`, for an op that may also leave its values in FP32."""
    if dtype != torch.float32:
        parse(dtype, who=op)
    elif scale is not None or transpose:
        raise ValueError(f"{op}: scale must be None and transpose False for float32")
    check(op, x, dtype, scale, transpose, granularity)


def fake(x: torch.Tensor, dtype: torch.dtype, transpose: bool, granularity: str) -> Cast:
    m, k = scale_layout.as_matrix(x.shape)
    shape_t = scale_layout.scale_shape(granularity, k, m)
    if not transpose or granularity == "tensor":
        shape_t = (0,)

    def fp32(shape: tuple[int, ...]) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((k, m) if transpose else (0, 0), dtype=dtype),
        fp32(scale_layout.scale_shape(granularity, m, k)),
        fp32(shape_t),
        fp32(()),
    )


def _reads_zero(scale: torch.Tensor) -> bool:
    """Whether the scale is known to be 0, without a host sync."""
    seen = type(scale) is torch.Tensor and scale.device.type == "cpu" and scale.numel() == 1
    return seen and not torch.compiler.is_compiling() and scale.item() == 0


def given_scale(
    op: str, scale: float | torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor | None:
    """The scale as a tensor on x's device. Only a tensor may hold 0 (not initialized)."""
    if isinstance(scale, torch.Tensor) and _reads_zero(scale):
        checks.is_scalar(op, "scale", scale, torch.float32)
        checks.on_device(op, "scale", scale, x.device, "the input")
        checks.needs_no_grad(op, "detach scale", scale)
        return scale
    return checks.positive_scale(op, "scale", scale, x.device)


def quantized(
    results: tuple[torch.Tensor, ...], fmt: Format, transpose: bool, granularity: str
) -> Quantized:
    """The first five results of an op, those that were not asked for as None."""
    data, data_t, scale_inv, scale_inv_t, amax = results[:5]
    own_scales = transpose and granularity != "tensor"
    return Quantized(
        data,
        scale_inv,
        amax,
        data_t if transpose else None,
        scale_inv_t if own_scales else None,
        fmt,
        granularity,
    )


def like_x(
    op: str, name: str, t: torch.Tensor, x: torch.Tensor, allowed: tuple[torch.dtype, ...]
) -> None:
    """Require an argument of x's shape, on x's device."""
    checks.is_tensor(op, name, t)
    checks.has_dtype(op, name, t, allowed)
    checks.has_shape(op, name, t, x.shape, "x's shape")
    checks.on_device(op, name, t, x.device, "x")
