"""The layout of the scales of a tensor: one per tensor, per row, or per block of 128."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BLOCK = 128
# How many rows and elements of K of an [M, K] tensor share a scale; 0: all of them.
GRANULARITIES = {
    "tensor": (0, 0),
    "row": (1, 0),
    "block1x128": (1, BLOCK),
    "block128x128": (BLOCK, BLOCK),
}
# Those of the ops that compute values and cast them; the scales of "mx" are codes, uint8.
FUSED = {**GRANULARITIES, "mx": (1, 32)}


def check(op: str, granularity: str, allowed: Iterable[str]) -> None:
    """ValueError listing the allowed names for another one."""
    if not isinstance(granularity, str) or granularity not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(f"{op}: granularity must be one of {names}, got {granularity!r}")


def as_matrix(shape: torch.Size) -> tuple[int, int]:
    """(M, K) of a tensor seen as [M, K]: leading dimensions are flattened, 0-dim is [1, 1]."""
    if len(shape) == 0:
        return 1, 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    """`contiguous()` and `clone()` keep the strides of an empty tensor."""
    return x.new_empty(x.shape).copy_(x)


def scale_shape(granularity: str, m: int, k: int) -> tuple[int, ...]:
    """The shape of the scales of an [m, k] tensor."""
    rows, cols = FUSED[granularity]
    if rows == 0:
        return ()
    return (-(-m // rows), -(-k // cols) if cols else 1)


def fits(scale: torch.Tensor, m: int, k: int) -> bool:
    """Whether `scale` has the shape of the scales of an [m, k] tensor for any granularity."""
    shapes = (scale_shape(name, m, k) for name in GRANULARITIES)
    return scale.numel() == 1 or tuple(scale.shape) in shapes


def expand(scale: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The scale of every element of an [m, k] tensor, from scales that fit it."""
    if scale.numel() == 1:
        return scale.reshape(()).expand(m, k)
    rows, cols = scale.shape
    if rows != m:
        scale = scale.repeat_interleave(BLOCK, 0)[:m]
    if cols != 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :k]
    return scale.expand(m, k)


def block_amax(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """max |x| of every block of x [M, K] in FP32, in the shape of the scales; 0 of empty blocks."""
    m, k = x.shape
    shape = scale_shape(granularity, m, k)
    rows, cols = GRANULARITIES[granularity]
    rows, cols = rows or m, cols or k
    if 0 in shape or x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    padding = (0, shape[1] * cols - k, 0, shape[0] * rows - m)
    padded = torch.nn.functional.pad(x.float().abs(), padding)
    return padded.reshape(shape[0], rows, shape[1], cols).amax(dim=(1, 3))


def swizzled_shape(rows: int, cols: int) -> tuple[int, ...]:
    """The shape of `swizzle` of [rows, cols]."""
    return -(-rows // 128), -(-cols // 4), 32, 16


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Codes of scales [R, C] as the tensor cores of Blackwell read them, zeros beyond R and C.

    Tiles of 128 x 4, each 512 bytes, row-major: [ceil(R / 128), ceil(C / 4), 32, 16]. Row r, column
    c is at [r // 128, c // 4, r % 32, r % 128 // 32 * 4 + c % 4]. Source: cuBLAS documentation,
    section "1D Block Scaling Factors Layout".
    """
    rows, cols = scales.shape
    down, across, *_ = swizzled_shape(rows, cols)
    padding = (0, across * 4 - cols, 0, down * 128 - rows)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = padded.reshape(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down, across, 32, 16).view(scales.dtype)


def unswizzle(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle`: [rows, cols]; scales [rows, cols] are returned as they are."""
    if scales.dim() == 2:
        return scales
    down, across = scales.shape[:2]
    tiles = scales.view(torch.uint8).reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :cols].view(scales.dtype)
