"""The casts and their scales by the rules of tests/independent*.py, in NumPy, with the arguments of
the ops' schemas."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import independent as ind
import independent_mx as mx
import numpy as np
import torch
from cases import from_bits

F32 = np.float32
SIDES = {"row": (1, 0), "block1x128": (1, 128), "block128x128": (128, 128)}


def filled(bits: np.ndarray, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of these bits, in their shape or another one."""
    return from_bits(bits, dtype).reshape(shape or bits.shape)


def number(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def fp32(x: np.ndarray, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.array(x, F32).reshape(shape or np.shape(x)))


def matrix(x: torch.Tensor) -> torch.Tensor:
    """As [M, K]: leading dimensions are flattened, no dimension is [1, 1]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def amax(x: torch.Tensor) -> torch.Tensor:
    return number(ind.amax(x))


def scales_of_blocks(x: torch.Tensor, spec: ind.Spec, sides: tuple[int, int], two: bool) -> Any:
    """The scale of each block, and of each element."""
    (m, k), height, width = x.shape, sides[0], sides[1] or max(x.shape[1], 1)
    magnitude = np.abs(ind.values(x))
    scales = np.ones((-(-m // height), -(-k // width) if sides[1] else 1), F32)
    for i, j in product(*map(range, scales.shape)):
        block = magnitude[i * height : (i + 1) * height, j * width : (j + 1) * width]
        scales[i, j] = ind.scale_of(block.max(initial=0.0), spec.max, power_of_two=two)
    return scales, np.kron(scales, np.ones((height, width), F32))[:m, :k]


def quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, transpose: bool,
    granularity: str, two: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    rows, largest = matrix(x), amax(x)
    nothing = torch.zeros(0, 0, dtype=dtype), torch.zeros(0)
    if granularity != "tensor":
        results: list[torch.Tensor] = []
        for part in (rows, rows.t())[: 1 + transpose]:
            spec = ind.BY_DTYPE[dtype]
            scales, of_each = scales_of_blocks(part, spec, SIDES[granularity], two)
            results += [filled(ind.cast(part, of_each, spec), dtype), fp32(1 / scales)]
        data, scale_inv, data_t, scale_inv_t = [*results, *nothing][:4]
        return data.reshape(x.shape), data_t, scale_inv, scale_inv_t, largest
    used = 0.0 if scale is None else scale.item()
    if used == 0:
        fp8 = dtype.itemsize == 1
        used = ind.scale_of(largest.item(), ind.BY_DTYPE[dtype].max, 0, two) if fp8 else 1.0
    elif not 2.0**-126 <= used <= 2.0**126:
        used = math.nan
    codes = ind.cast(rows, used, ind.BY_DTYPE[dtype])
    data_t = filled(codes.T, dtype, *codes.T.shape) if transpose else nothing[0]
    scale_inv = number(F32(1) / F32(used))
    return filled(codes, dtype).reshape(x.shape), data_t, scale_inv, nothing[1], largest


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, s = ind.values(matrix(data)), ind.values(scale_inv).astype(F32)
    m, k = rows.shape
    if s.size == 1:
        of_each = s.reshape(1, 1)
    else:  # of a row and of a block
        at = [i if s.shape[0] == m else i // 128 for i in range(m)]
        of_each = s[np.ix_(at, [j // 128 if s.shape[1] > 1 else 0 for j in range(k)])]
    with np.errstate(all="ignore"):
        return filled(ind.narrow(rows.astype(F32) * of_each, dtype), dtype).reshape(data.shape)


def quantize_mx(
    x: torch.Tensor, fmt: str, mode: str, transpose: bool, seed: torch.Tensor | None,
    swizzled: bool, with_amax: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    (spec, size), rows = mx.BLOCKS[fmt], ind.values(matrix(x))
    results: list[torch.Tensor] = []
    kind = torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8
    for stream, part in enumerate((rows, rows.T)[: 1 + transpose]):
        count = part.shape[0] * -(-part.shape[1] // size) * size
        random = None if seed is None else ind.random16(count, seed.item(), 0, 0, stream)
        codes, scales, of_tensor = mx.quantize(part, fmt, mode, ind.amax(x), random)
        scales = mx.swizzled(scales) if swizzled else scales
        results += [filled(codes, spec.dtype), filled(scales, kind)]
    results += [torch.zeros(0, 0, dtype=spec.dtype), torch.zeros(0, dtype=kind)]
    data, scale_inv, data_t, scale_inv_t = results[:4]
    data = data.reshape((*x.shape[:-1], data.shape[-1]) if x.dim() else ())
    of_tensor = torch.zeros(0) if of_tensor is None else number(of_tensor)
    largest = amax(x) if with_amax or fmt == "nvfp4" else torch.zeros(0)
    return data, data_t, scale_inv, scale_inv_t, of_tensor, largest


def dequantize_mx(
    data: torch.Tensor, scale_inv: torch.Tensor, tensor_inv: torch.Tensor | None, fmt: str,
    columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    codes, scales = (t.contiguous().view(torch.uint8).numpy() for t in (matrix(data), scale_inv))
    of_tensor = None if tensor_inv is None else tensor_inv.item()
    want = ind.narrow(mx.dequantize(codes, scales, of_tensor, fmt, columns), dtype)
    return filled(want, dtype).reshape((*data.shape[:-1], columns) if data.dim() else ())


def scale_from_amax_(
    scale: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype,
    margin: int, two: bool,
) -> None:  # fmt: skip
    pairs, most = zip(ind.values(amax).flat, ind.values(scale).flat, strict=True), ind.BY_DTYPE
    scales = [ind.scale_of(a, most[dtype].max, margin, two, previous=s) for a, s in pairs]
    want = np.array(scales, F32).reshape(tuple(scale.shape))
    scale.copy_(fp32(want))
    scale_inv.copy_(fp32(F32(1) / want))


DEFINITIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (amax, quantize, dequantize, quantize_mx, dequantize_mx, scale_from_amax_)
}
