"""dequantize: from a low-precision tensor and its scales back to fp32, bf16 or fp16; dequantize_mx:
from the codes of a block format."""

from __future__ import annotations

from typing import Any

import torch

from ..quantized import Quantized
from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import block_formats, scale_layout

LOW = (*checks.FP8, torch.float16, torch.bfloat16)


def dequantize_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """data.float() * scale_inv in FP32, then one rounding to dtype (IEEE)."""
    m, k = scale_layout.as_matrix(data.shape)
    wide = data.reshape(m, k).float() * scale_layout.expand(scale_inv, m, k)
    return wide.to(dtype).reshape(data.shape).contiguous()


def _check(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
    op = "dequantize"
    checks.has_dtype(op, "data", data, LOW)
    checks.matches(op, "scale_inv", scale_inv, (torch.float32,), data, owner="data")
    m, k = scale_layout.as_matrix(data.shape)
    if not scale_layout.fits(scale_inv, m, k):
        shapes = [scale_layout.scale_shape(name, m, k) for name in scale_layout.GRANULARITIES]
        raise ValueError(
            f"{op}: scale_inv must have one of the shapes {shapes} for data {tuple(data.shape)}, "
            f"got {tuple(scale_inv.shape)}"
        )
    checks.is_float(op, "dtype", dtype)


dequantize_op = Op(
    "dequantize",
    "(Tensor data, Tensor scale_inv, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    fake=lambda data, dtype: data.new_empty(data.shape, dtype=dtype),
    check=_check,
    triton="dequantize",
)


def dequantize_mx_reference(args: Any) -> torch.Tensor:
    """Return element * scale of the codes of `quantize_mx` as `dtype` (fp32, bf16 or fp16).

    data, scale_inv, fmt: of `quantize_mx`, data and scale_inv of any strides, or its data_t and
    scale_inv_t. columns: K, the elements of a row. tensor_scale_inv: fp32 of one element, [M, 1] or
    [M, ceil(K / 128)], "nvfp4" only: scales are first multiplied with it, in FP32; None for values
    without it. Returns data's shape with `columns` as the last dimension, contiguous.

    The product is exact, but for the rounding to FP32 of subnormal and too large numbers, followed
    by one rounding to dtype; with tensor_scale_inv both products are rounded to FP32. A block whose
    scale is NaN is NaN. ValueError or TypeError names an invalid argument.
    """
    data, scale_inv, tensor_scale_inv, fmt, columns, dtype = args
    block = block_formats.parse("dequantize_mx", fmt)
    m, size = scale_layout.as_matrix(data.shape)
    codes = data.reshape(m, size)
    if block.element.bits == 4:
        codes = block_formats.split(codes, columns)
    wide = codes.float() if block.element.bits == 8 else block_formats.decode(codes, block.element)
    scale = block_formats.scales(block, scale_inv, tensor_scale_inv)
    scale = scale.repeat_interleave(block.block, 1)[:, :columns]
    return (wide * scale).to(dtype).reshape(_shape(data, columns)).contiguous()


def _shape(data: torch.Tensor, columns: int) -> tuple[int, ...]:
    return (*data.shape[:-1], columns) if data.dim() else ()


def _check_mx(args: Any) -> None:
    op = "dequantize_mx"
    data, scale_inv, tensor_scale_inv, fmt, columns, dtype = args
    block = block_formats.parse(op, fmt)
    checks.has_dtype(op, "data", data, (block.element.dtype,))
    checks.matches(op, "scale_inv", scale_inv, (block.scale_dtype,), data, owner="data")
    m, size = scale_layout.as_matrix(data.shape)
    wanted, across = block_formats.sizes(fmt, columns)
    if columns < 0 or wanted != size:
        raise ValueError(
            f"{op}: columns must fit data {tuple(data.shape)} in {fmt}, whose last dimension is "
            f"columns / {block_formats.per_byte(fmt)}, rounded up; got {columns}"
        )
    checks.has_shape(op, "scale_inv", scale_inv, (m, across), f"[M, K / {block.block}]")
    if tensor_scale_inv is not None:
        if block.outer is None:
            raise ValueError(f"{op}: tensor_scale_inv must be None for {fmt}, got a tensor")
        shapes = [scale_layout.scale_shape(name, m, columns) for name in ("row", "block1x128")]
        if tuple(tensor_scale_inv.shape) not in shapes:
            checks.is_scalar(op, "tensor_scale_inv", tensor_scale_inv, torch.float32, data, "data")
    checks.is_float(op, "dtype", dtype)


def _no_kernel(args: Any, _: Any) -> str | None:
    one = args.tensor_scale_inv is None or args.tensor_scale_inv.numel() == 1
    plain = one and args.fmt in block_formats.BLOCK_FORMATS
    return None if plain else f"no kernel has been written for {args.fmt} with these scales"


dequantize_mx_op = Op(
    "dequantize_mx",
    "(Tensor data, Tensor scale_inv, Tensor? tensor_scale_inv, str fmt, int columns, "
    "ScalarType dtype) -> Tensor",
    reference=dequantize_mx_reference,
    fake=lambda args: args.data.new_empty(_shape(args.data, args.columns), dtype=args.dtype),
    check=_check_mx,
    triton="dequantize",
    refuses=dict.fromkeys(("cpp", "cuda", "triton"), _no_kernel),
)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return q.data * q.scale_inv as `dtype` (fp32, bf16 or fp16), contiguous, in q's shape.

    Each element is multiplied by the scale of its row or block, for every granularity of `quantize`
    and for `q.t()`, whose scales are per column. Decoding is exact and the product is FP32; the
    only rounding is the one to `dtype`. In the block formats elements are multiplied by the scale
    of their block ("nvfp4": by its FP32 product with that of the tensor), and a block whose scale
    is NaN is NaN. ValueError or TypeError names an invalid argument.
    """
    op = "dequantize"
    if not isinstance(q, Quantized):
        got = type(q).__name__
        raise TypeError(f"{op}: q must be a Quantized (from mixprec.quantize), got {got}")
    checks.is_tensor(op, "q.data", q.data)
    checks.is_tensor(op, "q.scale_inv", q.scale_inv)
    checks.needs_no_grad(op, "detach q", q.data, q.scale_inv)
    name = block_formats.name_of(q.fmt, q.granularity)
    if name is not None:
        name = block_formats.parse(op, name).name
        rows = q.t() if q.is_t else q
        columns = rows.shape[-1] if rows.shape else 1
        wide = dequantize_mx_op(rows.data, rows.scale_inv, q.tensor_scale_inv, name, columns, dtype)
        return wide.t().contiguous() if q.is_t else wide
    if _along_columns(q):
        return dequantize_op(q.data.t(), q.scale_inv.t(), dtype).t().contiguous()
    return dequantize_op(q.data, q.scale_inv, dtype)


def _along_columns(q: Quantized) -> bool:
    """Whether the scales fit only the transpose of the data: q is the result of `t()`."""
    if q.data.dim() != 2 or q.scale_inv.dim() != 2:
        return False
    m, k = q.data.shape
    return not scale_layout.fits(q.scale_inv, m, k) and scale_layout.fits(q.scale_inv.t(), k, m)
