"""torch.nn.functional.scaled_mm with FP32 scales per 1 x 128 and 128 x 128, which cuBLAS multiplies
the FP32 sum of each 128 of K with, on Hopper."""

from __future__ import annotations

import torch
from torch.nn import functional

from .._reference.scale_layout import BLOCK
from .library import Capability

_CUBLAS = (12, 9)  # the CUDA version whose cuBLAS has them


def _squares(scale_shape: torch.Size, rows: int, k: int) -> bool | None:
    """Whether an operand [rows, k] has a scale for each 128 x 128, or for each 1 x 128; None for
    neither."""
    across = -(-k // BLOCK)
    if scale_shape == (rows, across):
        return False
    return True if scale_shape == (-(-rows // BLOCK), across) else None


def why_not(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    capability: Capability | None,
) -> str | None:
    """Why torch has no single call for scales that are neither per tensor nor per row."""
    who, (m, k), n = "torch.nn.functional.scaled_mm", a.shape, b.shape[1]
    if not a.dtype == b.dtype == torch.float8_e4m3fn:
        return f"{who} takes scales of blocks for float8_e4m3fn operands only"
    if capability is not None and capability[0] != 9:
        return f"{who} takes scales of blocks of 128 on compute capability 9 only"
    cuda = torch.version.cuda
    if cuda is not None and tuple(map(int, cuda.split(".")[:2])) < _CUBLAS:
        return f"{who} takes scales of blocks with CUDA 12.9 or later, this torch has {cuda}"
    of_a, of_b = _squares(a_scale_inv.shape, m, k), _squares(b_scale_inv.t().shape, n, k)
    if of_a is None or of_b is None or (of_a and of_b):
        return (
            f"{who} takes scales of blocks per 1 x 128, of one operand also per 128 x 128, got "
            f"{tuple(a_scale_inv.shape)} and {tuple(b_scale_inv.shape)}"
        )
    if k % BLOCK or (of_a and m % BLOCK) or (of_b and n % BLOCK) or m % 4:
        return (
            f"{who} with scales of blocks needs whole blocks and M that is a multiple of 4, got "
            f"M = {m}, N = {n}, K = {k}"
        )
    return None


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What `why_not` accepts. Never with fast accumulation: each 128 of K is added in FP32."""
    scale_a, recipe_a = _scales(a_scale_inv, a)
    scale_b, recipe_b = _scales(b_scale_inv.t(), b.t())
    return functional.scaled_mm(
        a, b, scale_a, recipe_a, scale_b, recipe_b, bias=bias, output_dtype=out_dtype
    )


def _scales(
    scale_inv: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, functional.ScalingType]:
    """The scales of x [R, K] as cuBLAS reads them, and their kind: per 1 x 128 [R, K / 128], column
    by column; per 128 x 128 [K / 128 up to a multiple of 4, R / 128], column by column."""
    if not _squares(scale_inv.shape, *x.shape):
        return scale_inv.t().contiguous().t(), functional.ScalingType.BlockWise1x128
    padded = functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous()
    return padded.t(), functional.ScalingType.BlockWise128x128
