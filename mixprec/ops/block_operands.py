"""Block formats as operands of `gemm`: multiplied by the GPU where it can, else decoded to bf16,
which multiplies them without a loss."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ..formats import E4M3
from ..quantized import Quantized
from ._dispatch import simulation
from ._dispatch.scaled_mm import Blocks
from ._reference import block_formats, scale_layout
from .dequantize import dequantize_mx_op


def is_block(x: object) -> bool:
    return isinstance(x, Quantized) and x.columns is not None


def decode(x: Blocks) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The bf16 values [R, columns] without the tensor's scale, and that scale.

    Exact: an element times the scale of its block has at most 6 significant bits, of bf16's 8. Only
    magnitudes beyond bf16's range, below 2^-133 or above its maximum, are rounded.
    """
    blocks = block_formats.sizes(x.fmt, x.columns)[1]
    scale_inv = scale_layout.unswizzle(x.scale_inv, x.data.shape[0], blocks)
    wide = dequantize_mx_op(x.data, scale_inv, None, x.fmt, x.columns, torch.bfloat16)
    return wide, x.tensor_scale_inv


def blocks_of(q: Quantized) -> Blocks:
    """A matrix in a block format, or that of which it is the t()."""
    name = block_formats.name_of(q.fmt, q.granularity)
    name = name and block_formats.parse("gemm", name).name
    if name is None or q.columns is None:
        raise ValueError(f"gemm: a Quantized must be from mixprec.quantize, got {q.granularity!r}")
    rows = q.t() if q.is_t else q
    return Blocks(rows.data, rows.scale_inv, q.tensor_scale_inv, name, q.columns)


def unpacked(data: torch.Tensor, fmt: str) -> int:
    """The number of columns in `data`, with the one that fills up an odd number of half bytes."""
    return data.shape[-1] * block_formats.per_byte(fmt)


def exponents(x: Blocks, size: int) -> torch.Tensor:
    """int32 [R, columns / size], columns rounded up to 64. size 32: the smallest exponent of each
    block's numbers; 16: that of its scale. See `simulation.step`."""
    block = block_formats.BLOCK_FORMATS[x.fmt]
    count = block_formats.sizes(x.fmt, x.columns)[1]
    scale_inv = scale_layout.unswizzle(x.scale_inv, x.data.shape[0], count)
    if block.nvfp4:
        power = torch.frexp(scale_inv.float()).exponent - 1
        power = power.clamp(simulation.least_exponent(E4M3), 8)  # NaN: any
    else:
        least = simulation.least_exponent(block.element) if size == 32 else 0
        power = scale_inv.int() - 127 + least
    power = power.repeat_interleave(block.block // size, 1)
    return pad(power, (0, -(-x.columns // 64) * (64 // size) - power.shape[1]))
