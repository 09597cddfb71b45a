"""The structs of csrc/cuda/gemm/config/gemm_args.h, for ctypes."""

from __future__ import annotations

import ctypes

import torch
from emulated.shim.runner import DTYPES


class ScaleView(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("chunk_stride", ctypes.c_int64),
        ("row_shift", ctypes.c_int),
    )  # fmt: skip


class Epilogue(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p), ("pitch", ctypes.c_int64), ("out_dtype", ctypes.c_int32),
        ("accumulate", ctypes.c_bool), ("bias", ctypes.c_void_p), ("bias_dtype", ctypes.c_int32),
        ("a_scale", ScaleView), ("b_scale", ScaleView),
    )  # fmt: skip


def epilogue(
    out: torch.Tensor, pitch: int, accumulate: bool = False, bias: torch.Tensor | None = None,
    a_scale: ScaleView | None = None, b_scale: ScaleView | None = None,
) -> Epilogue:  # fmt: skip
    result = Epilogue(out.data_ptr(), pitch, DTYPES.index(out.dtype), accumulate)
    if bias is not None:
        result.bias, result.bias_dtype = bias.data_ptr(), DTYPES.index(bias.dtype)
    result.a_scale, result.b_scale = a_scale or ScaleView(), b_scale or ScaleView()
    return result


def scale_view(scale: torch.Tensor | None, shift: int = 0) -> ScaleView:
    """scale: fp32 [], [rows] or [rows, chunks], rows being groups of 2 ** shift of them."""
    if scale is None:
        return ScaleView()
    strides = (*scale.stride(), 0, 0)[:2]
    return ScaleView(scale.data_ptr(), *strides, shift)
