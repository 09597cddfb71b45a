"""The vendor's GEMMs, torch.mm and torch._scaled_mm, for calls that they compute exactly as gemm is
defined: FP32 accumulation and one rounding, in one call.

scaled_mm has those with scales of blocks."""

from __future__ import annotations

from typing import Any

import torch

from . import checks, scaled_mm
from .library import Capability

# The settings that let torch.mm accumulate in less than FP32: across a split K, or everywhere.
_LOOSE = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}


def gemm_why_not(args: Any, capability: Capability | None) -> str | None:
    """Why torch has no single call for these arguments of gemm, or for the product in FP32 that
    gemm_accumulate_ adds to acc; None if it has."""
    a, bias = args.a, getattr(args, "bias", None)
    out_dtype = getattr(args, "out_dtype", torch.float32)
    if a.dtype in checks.FP8:
        return _scaled_why_not(args, bias, out_dtype, capability)
    if args.a_scale_inv is not None or args.b_scale_inv is not None:
        return f"torch.mm takes no scales for {_name(a.dtype)} operands"
    if bias is not None and not bias.dtype == out_dtype == a.dtype:
        return f"torch.addmm takes a bias only where it, the operands and the result are {a.dtype}"
    if out_dtype != a.dtype and out_dtype != torch.float32:
        return f"torch.mm gives {_name(a.dtype)} operands no {_name(out_dtype)} result"
    return None


def _scaled_why_not(
    args: Any, bias: torch.Tensor | None, out_dtype: torch.dtype, capability: Capability | None
) -> str | None:
    a, b, a_scale_inv, b_scale_inv = args.a, args.b, args.a_scale_inv, args.b_scale_inv
    if capability is not None and capability < (8, 9):
        return "torch._scaled_mm needs compute capability 8.9 or more"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "torch._scaled_mm does not multiply float8_e5m2 by float8_e5m2"
    m, k = a.shape
    n = b.shape[1]
    if m == 0 or n == 0 or k == 0 or n % 16 or k % 16:
        return f"torch._scaled_mm needs K and N that are multiples of 16, got K = {k}, N = {n}"
    kind = granularity(a_scale_inv, b_scale_inv, m, n)
    # The tensor cores of Blackwell read both in either order; torch's product by rows does not.
    either = capability is not None and capability[0] == 10 and kind == "tensor"
    if not (_in_lines(a, either) and _in_lines(b.t(), either)):
        return (
            "torch._scaled_mm needs K next to each other in memory and lines 16 bytes apart, "
            f"or a multiple, got strides {a.stride()} of a and {b.stride()} of b"
        )
    if bias is not None and (bias.dtype != out_dtype or out_dtype == torch.float32):
        return f"torch._scaled_mm takes no {_name(bias.dtype)} bias for a {_name(out_dtype)} result"
    if bias is not None and not bias.is_contiguous():
        return "torch._scaled_mm needs a contiguous bias"
    if kind == "tensor":
        return None
    if kind == "mixed" or a_scale_inv is None or b_scale_inv is None:
        return "torch._scaled_mm takes scales of one granularity for both operands"
    if kind == "blocks":
        return scaled_mm.why_not_fp32_scales((a, b, a_scale_inv, b_scale_inv), capability)
    if capability is not None and capability[0] not in (9, 10):
        return "torch._scaled_mm takes scales per row only on compute capability 9 and 10"
    if out_dtype != torch.bfloat16 or b.dtype != torch.float8_e4m3fn:
        return (
            "torch._scaled_mm takes scales per row only for float8_e4m3fn b and a bfloat16 result"
        )
    if not (a_scale_inv.is_contiguous() and b_scale_inv.is_contiguous()):
        return "torch._scaled_mm needs contiguous scales"
    return None


def granularity(
    a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None, m: int, n: int
) -> str:
    """Of FP8 scales: "tensor", "row", "blocks" or "mixed"."""
    one_a = a_scale_inv is None or a_scale_inv.numel() == 1
    one_b = b_scale_inv is None or b_scale_inv.numel() == 1
    if one_a and one_b:
        return "tensor"
    if one_b or a_scale_inv is None or b_scale_inv is None or (one_a and m != 1):
        return "mixed"
    rows = (one_a or a_scale_inv.shape == (m, 1)) and b_scale_inv.shape == (1, n)
    return "row" if rows else "blocks"


def _in_lines(x: torch.Tensor, either: bool) -> bool:
    """Whether the lines of x [R, K] along K, or with `either` along R, start on 16 bytes."""
    (rows, cols), (line, step) = x.shape, x.stride()
    if step == 1 and line >= cols and line % 16 == 0:
        return True
    return either and line == 1 and step >= rows and rows % 16 == 0 and step % 16 == 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sum_in_fp32(dtype: torch.dtype) -> None:
    """Turn off all settings that let torch.mm accumulate products of `dtype` in less than FP32.

    They are of the process, so they stay off: what is turned back after each product, another
    thread's products would see in between."""
    matmul = torch.backends.cuda.matmul
    for flag in _LOOSE[dtype]:
        if getattr(matmul, flag):
            setattr(matmul, flag, False)


def gemm_vendor(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    if a.dtype in checks.FP8:
        kind = granularity(a_scale_inv, b_scale_inv, a.shape[0], b.shape[1])
        a, b = scaled_mm.aligned(a), scaled_mm.aligned(b.t()).t()
        if kind == "blocks":
            operands = a, b, a_scale_inv, b_scale_inv
            return scaled_mm.multiply_fp32_scales(operands, bias, out_dtype)
        return torch._scaled_mm(
            a,
            b,
            _scale(a_scale_inv, a, kind),
            _scale(b_scale_inv, a, kind),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )
    sum_in_fp32(a.dtype)
    if bias is not None:
        return torch.addmm(bias, a, b)
    if out_dtype == a.dtype:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=out_dtype)


def _scale(t: torch.Tensor | None, a: torch.Tensor, kind: str) -> torch.Tensor:
    if t is None:
        return torch.ones((), dtype=torch.float32, device=a.device)
    return t.reshape(() if kind == "tensor" else (1, 1)) if t.numel() == 1 else t


def gemm_accumulate_vendor_(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> None:
    if a.dtype in checks.FP8:
        acc.add_(gemm_vendor(a, b, a_scale_inv, b_scale_inv, None, torch.float32, False))
    else:  # in one pass over acc
        sum_in_fp32(a.dtype)
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)


_MOST_GROUPS = 1023  # a thread of one block prepares each


def grouped_why_not(args: Any, capability: Capability | None) -> str | None:
    """Why torch has no call for these arguments of gemm_grouped; None if it has."""
    a, b, itemsize = args.a, args.b, args.a.dtype.itemsize
    if a.dtype == b.dtype == torch.bfloat16:
        reason = _grouped_16_bits_why_not(args, capability)
    elif a.dtype == b.dtype == torch.float8_e4m3fn:
        reason = _grouped_scaled_why_not(args, capability)
    else:
        return "torch.nn.functional.grouped_mm takes bfloat16 operands, or float8_e4m3fn ones"
    if reason is not None:
        return reason
    if args.out_dtype != torch.bfloat16:
        return "torch.nn.functional.grouped_mm gives a bfloat16 result only"
    if args.offs.shape[0] > _MOST_GROUPS or args.offs.stride(0) != 1:
        return f"torch.nn.functional.grouped_mm takes contiguous offs of {_MOST_GROUPS} groups"
    sizes = (*a.shape, b.shape[-1])
    static = sizes[1:] if b.dim() == 3 else sizes[::2]
    if 0 in (*sizes, args.offs.shape[0]) or any(n * itemsize % 16 for n in static):
        return f"torch.nn.functional.grouped_mm needs rows of a multiple of 16 bytes, got {sizes}"
    if not all(_rows_aligned(x) for x in (a, b)):
        return (
            "torch.nn.functional.grouped_mm needs operands and lines that begin at multiples of 16 "
            f"bytes, got strides {a.stride()} of a and {b.stride()} of b"
        )
    return None


def _grouped_16_bits_why_not(args: Any, capability: Capability | None) -> str | None:
    if capability is not None and capability[0] not in (9, 10):
        return "torch.nn.functional.grouped_mm reads offs on the host but on 9.0 and 10.0"
    if args.a_scale_inv is not None or args.b_scale_inv is not None:
        return "torch.nn.functional.grouped_mm takes no scales for bfloat16 operands"
    if args.b.dim() == 3 and args.a.stride(1) != 1:
        return "torch.nn.functional.grouped_mm is used for rows next to each other in memory"
    if args.b.dim() == 2 and (args.a.stride(0) != 1 or args.b.stride(1) != 1):
        # Along S lines of 16 bytes would have to begin where a group does.
        return "torch.nn.functional.grouped_mm needs groups of whole lines of memory"
    return None


def _grouped_scaled_why_not(args: Any, capability: Capability | None) -> str | None:
    a, b, a_scale_inv, b_scale_inv = args.a, args.b, args.a_scale_inv, args.b_scale_inv
    if capability is not None and capability[0] != 9:
        return "torch.nn.functional.scaled_grouped_mm takes scales per row on 9.0 only"
    if b.dim() == 2:
        return "torch.nn.functional.scaled_grouped_mm needs groups of multiples of 16 along K"
    if a.stride(1) != 1 or b.stride(1) != 1:
        return "torch.nn.functional.scaled_grouped_mm needs K next to each other in memory"
    shapes = (a.shape[0], 1), (b.shape[0], 1, b.shape[2])
    for scale, shape in zip((a_scale_inv, b_scale_inv), shapes, strict=True):
        if scale is None or scale.shape != shape or not scale.is_contiguous():
            return "torch.nn.functional.scaled_grouped_mm takes contiguous scales of rows only"
    return None


def _rows_aligned(x: torch.Tensor) -> bool:
    """One of the last two strides is 1; the others, and the first element, are at 16 bytes."""
    *outer, across, along = x.stride()
    inner = x.shape[-1]
    if along != 1:
        across, along, inner = along, across, x.shape[-2]
    elements = 16 // x.dtype.itemsize
    lines = (*outer, across, x.storage_offset())
    return along == 1 and across >= inner and all(n % elements == 0 for n in lines)


def gemm_grouped_vendor(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    by_rows = b.dim() == 3
    s = a.shape[0 if by_rows else 1]
    offs = offs.clamp(0, s).cummax(0).values  # torch's kernels end the program otherwise
    if a_scale_inv is None or b_scale_inv is None:
        out = torch._grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
    else:
        rows, columns = a_scale_inv.squeeze(1), b_scale_inv.squeeze(1)
        out = torch._scaled_grouped_mm(
            a, b, rows, columns, offs, out_dtype=out_dtype, use_fast_accum=fast_accum
        )
    if by_rows:  # torch does not write the rows beyond the last group
        beyond = torch.arange(s, device=a.device) >= offs.narrow(0, -1, 1)
        out = out.masked_fill_(beyond.unsqueeze(1), 0.0)
    return out
