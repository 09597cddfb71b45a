"""The vendor's grouped GEMMs, torch._grouped_mm and torch._scaled_grouped_mm, for the calls that
they compute as gemm_grouped is defined and without a host sync."""

from __future__ import annotations

from typing import Any

import torch

from .library import Capability

_ORDER = ("vendor", "triton", "reference")
_MOST_GROUPS = 1023  # a thread of one block prepares each


def order(args: Any, capability: Capability | None) -> tuple[str, ...]:
    """Nothing is measured: the vendor's first, wherever a call of it is exact."""
    return _ORDER


def why_not(args: Any, capability: Capability | None) -> str | None:
    """Why torch has no call for these arguments of gemm_grouped; None if it has."""
    a, b, itemsize = args.a, args.b, args.a.dtype.itemsize
    if a.dtype == b.dtype == torch.bfloat16:
        reason = _sixteen_why_not(args, capability)
    elif a.dtype == b.dtype == torch.float8_e4m3fn:
        reason = _scaled_why_not(args, capability)
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
    if not all(_aligned(x) for x in (a, b)):
        return (
            "torch.nn.functional.grouped_mm needs operands and lines that begin at multiples of 16 "
            f"bytes, got strides {a.stride()} of a and {b.stride()} of b"
        )
    return None


def _sixteen_why_not(args: Any, capability: Capability | None) -> str | None:
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


def _scaled_why_not(args: Any, capability: Capability | None) -> str | None:
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


def _aligned(x: torch.Tensor) -> bool:
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
