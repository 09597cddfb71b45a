"""dequantize_mx: from a block format, MX or NVFP4, back to fp32, bf16 or fp16."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import block_formats, scale_layout


def dequantize_mx_reference(args: Any) -> torch.Tensor:
    """Return element * scale of the codes of `quantize_mx` as `dtype` (fp32, bf16 or fp16).

    data, scale_inv, fmt: of `quantize_mx`, data and scale_inv of any strides, or its data_t and
    scale_inv_t. columns: K, the elements of a row. tensor_scale_inv: fp32, one element, "nvfp4"
    only: scales are first multiplied with it, in FP32; None for values without it. Returns data's
    shape with `columns` as the last dimension, contiguous.

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
    scale = scale_inv.float() if block.nvfp4 else block_formats.e8m0_value(scale_inv)
    if tensor_scale_inv is not None:
        scale = scale * tensor_scale_inv.reshape(())
    scale = scale.repeat_interleave(block.block, 1)[:, :columns]
    return (wide * scale).to(dtype).reshape(_shape(data, columns)).contiguous()


def _shape(data: torch.Tensor, columns: int) -> tuple[int, ...]:
    return (*data.shape[:-1], columns) if data.dim() else ()


def _check(args: Any) -> None:
    op = "dequantize_mx"
    data, scale_inv, tensor_scale_inv, fmt, columns, dtype = args
    block = block_formats.parse(op, fmt)
    checks.has_dtype(op, "data", data, (block.element.dtype,))
    scales = torch.float8_e4m3fn if block.nvfp4 else torch.uint8
    checks.has_dtype(op, "scale_inv", scale_inv, (scales,))
    checks.on_device(op, "scale_inv", scale_inv, data.device, "data")
    m, size = scale_layout.as_matrix(data.shape)
    wanted, across = block_formats.sizes(fmt, columns)
    if columns < 0 or wanted != size:
        raise ValueError(
            f"{op}: columns must fit data {tuple(data.shape)} in {fmt}, whose last dimension is "
            f"columns / {block_formats.per_byte(fmt)}, rounded up; got {columns}"
        )
    checks.has_shape(op, "scale_inv", scale_inv, (m, across), f"[M, K / {block.block}]")
    if tensor_scale_inv is not None:
        if not block.nvfp4:
            raise ValueError(f"{op}: tensor_scale_inv must be None for {fmt}, got a tensor")
        checks.is_scalar(op, "tensor_scale_inv", tensor_scale_inv, torch.float32)
        checks.on_device(op, "tensor_scale_inv", tensor_scale_inv, data.device, "data")
    if dtype not in checks.FLOATS:
        raise ValueError(f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")


def _fake(data: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return data.new_empty(_shape(data, columns), dtype=dtype)


dequantize_mx_op = Op(
    "dequantize_mx",
    "(Tensor data, Tensor scale_inv, Tensor? tensor_scale_inv, str fmt, int columns, "
    "ScalarType dtype) -> Tensor",
    reference=dequantize_mx_reference,
    fake=_fake,
    check=_check,
    triton="dequantize",
)
