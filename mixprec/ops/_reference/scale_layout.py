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
