"""Block formats as operands of `gemm`: decoded to bf16, which multiplies them without a loss."""

from __future__ import annotations

import torch

from ..quantized import Quantized
from ._reference import block_formats
from .dequantize_mx import dequantize_mx_op


def is_block(x: object) -> bool:
    return isinstance(x, Quantized) and x.columns is not None


def decode(
    data: torch.Tensor,
    scale_inv: torch.Tensor | None,
    tensor_scale_inv: torch.Tensor | None,
    fmt: str,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The bf16 values [R, columns] of rows of blocks without their tensor's scale, and that scale.

    Exact: an element times the scale of its block has at most 6 significant bits, of bf16's 8. Only
    magnitudes beyond bf16's range, below 2^-133 or above its maximum, are rounded.
    """
    assert scale_inv is not None, "all block formats have it"
    return dequantize_mx_op(data, scale_inv, None, fmt, columns, torch.bfloat16), tensor_scale_inv


def decode_quantized(q: Quantized) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`decode` of a matrix in a block format, or of its t()."""
    name = block_formats.name_of(q.fmt, q.granularity)
    if name is None or q.columns is None:
        raise ValueError(f"gemm: a Quantized must be from mixprec.quantize, got {q.granularity!r}")
    rows = q.t() if q.is_t else q
    data, scale = decode(rows.data, rows.scale_inv, q.tensor_scale_inv, name, q.columns)
    return data.t() if q.is_t else data, scale


def unpacked(data: torch.Tensor, fmt: str) -> int:
    """The number of columns in `data`, with the one that fills up an odd number of half bytes."""
    return data.shape[-1] * block_formats.per_byte(fmt)


def check_not_simulated(simulated: str | None) -> None:
    if simulated is not None:
        raise ValueError(
            "simulate: tensor cores apply the scales of block formats inside of a product, which "
            "is not simulated: leave the block for recipes and operands of them"
        )
