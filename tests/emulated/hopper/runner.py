"""Compiles gemm_sm90.cuh with g++ against the model beside this file, and calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from emulated.shim import runner

HERE = Path(__file__).resolve().parent
UNITS = ("mbarrier", "operand", "shared_words", "tma", "units", "warps", "wgmma")
TYPES = {
    torch.bfloat16: "Bf16",
    torch.float16: "Fp16",
    torch.float8_e4m3fn: "E4m3",
    torch.float8_e5m2: "E5m2",
}


# The structs of csrc/cuda/gemm/config/gemm_args.h.
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
    result = Epilogue(out.data_ptr(), pitch, runner.DTYPES.index(out.dtype), accumulate)
    if bias is not None:
        result.bias, result.bias_dtype = bias.data_ptr(), runner.DTYPES.index(bias.dtype)
    result.a_scale, result.b_scale = a_scale or ScaleView(), b_scale or ScaleView()
    return result


def scale_view(scale: torch.Tensor | None, shift: int = 0) -> ScaleView:
    """scale: fp32 [], [rows] or [rows, chunks], rows being groups of 2 ** shift of them."""
    if scale is None:
        return ScaleView()
    strides = (*scale.stride(), 0, 0)[:2]
    return ScaleView(scale.data_ptr(), *strides, shift)


class Operand(ctypes.Structure):
    """runner.cpp: struct Operand."""

    _fields_ = (("data", ctypes.c_void_p), ("pitch", ctypes.c_int64), ("major", ctypes.c_int))


class Call(ctypes.Structure):
    """runner.cpp: struct Call."""

    _fields_ = (
        ("row", ctypes.c_int), ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int),
        ("a", Operand), ("b", Operand), ("a_dtype", ctypes.c_int32), ("b_dtype", ctypes.c_int32),
        ("epilogue", Epilogue), ("a_chunk", ScaleView), ("b_chunk", ScaleView),
        ("a_scales", ctypes.c_void_p), ("b_scales", ctypes.c_void_p),
        ("stages", ctypes.c_int), ("splits", ctypes.c_int), ("sms", ctypes.c_int),
        ("tma_store", ctypes.c_bool), ("partial", ctypes.c_void_p),
    )  # fmt: skip


@cache
def units() -> tuple[Path, ...]:
    """The model, compiled: the same for all programs that use it."""
    files = (runner.SCHEDULER, *(HERE / f"{name}.cpp" for name in UNITS))
    return tuple(runner.compile_([f"-I{HERE}", "-O3", "-c", file], ".o") for file in files)


@cache
def library(a: torch.dtype, b: torch.dtype, sums: str = "direct") -> ctypes.CDLL:
    """The instances for operands of these types; sums: enum class Accumulate."""
    types = (f"-DTYPE_A={TYPES[a]}", f"-DTYPE_B={TYPES[b]}", f"-DSUMS={sums}")
    words = [f"-I{HERE}", "-O1", *types, "-shared", *units(), HERE / "runner.cpp"]
    loaded = ctypes.CDLL(str(runner.compile_(words, ".so")))
    loaded.last_error.restype = ctypes.c_char_p
    return loaded


def _operand(x: torch.Tensor, k: int) -> Operand:
    """x: [rows, K], or [K, rows] transposed; k: which of its dimensions K is."""
    size, major = x.dtype.itemsize, 0 if x.stride(k) == 1 else 1
    assert x.stride(1 - major if k else major) == 1, "one of the dimensions has to be contiguous"
    return Operand(x.data_ptr(), x.stride(1 - k if major == 0 else k) * size, major)


def gemm(
    loaded: ctypes.CDLL,
    row: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    seed: int,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    scales: Sequence[ScaleView] = (),
    chunk_scales: Sequence[ScaleView] = (),
    copy_a_scales: bool = False,
    stages: int = 0,
    splits: int = 1,
    sms: int = 2,  # few: blocks walk over several tiles
    tma_store: bool = True,
) -> int:
    """out = a [M, K] @ b [K, N], or +=, on instance `row` of tile_configs.h; the error."""
    [m, k], [_, n] = a.shape, b.shape
    finish = epilogue(out, out.stride(0), accumulate, bias, *scales)
    partial = torch.full((splits, m, n), torch.nan) if splits > 1 else None
    call = Call(
        row=row, m=m, n=n, k=k, a=_operand(a, 1), b=_operand(b, 0),
        a_dtype=runner.DTYPES.index(a.dtype), b_dtype=runner.DTYPES.index(b.dtype),
        epilogue=finish, stages=stages, splits=splits, sms=sms, tma_store=tma_store,
        partial=None if partial is None else partial.data_ptr(),
    )  # fmt: skip
    if chunk_scales:
        call.a_chunk, call.b_chunk = chunk_scales
        copies = [torch.full((-(-k // 128), (x + 3) // 4 * 4), torch.nan) for x in (m, n)]
        if copy_a_scales:
            call.a_scales = copies[0].data_ptr()
        if call.b_chunk.data and call.b_chunk.row_shift == 0:
            call.b_scales = copies[1].data_ptr()
    loaded.seed(ctypes.c_uint64(seed))
    return int(loaded.gemm(ctypes.byref(call)))
