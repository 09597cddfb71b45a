"""Examples of the block formats, and of pack and unpack."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..._reference import block_formats
from .inputs import FLOATS, Arguments, codes, random, tensor

SHAPES = ((80, 112), (70, 101))
_OTHER_MODES = [mode for mode in block_formats.SCALE_MODES if mode != "rceil"]
PACKED = ((32, 80), (20, 129))


def _magnitudes(device: str, shape: tuple[int, int]) -> torch.Tensor:
    """Blocks of different magnitudes, of zeros, with Inf and NaN, and the last ones incomplete."""
    x = random(device, 1, shape) * 2.0 ** (torch.arange(shape[1], device=device) - 50.0)
    x[3], x[9, 40], x[-1, -1], x[17, 0], x[5] = 0.0, math.nan, math.inf, -1e38, 1e-40
    return x


def quantize_mx(device: str) -> Iterator[Arguments]:
    seed = tensor(device, [2**40 + 7], torch.int64)
    for shape in SHAPES:
        x = _magnitudes(device, shape)
        for i, (fmt, block) in enumerate(block_formats.BLOCK_FORMATS.items()):
            for transpose in (True, False):
                yield [x.bfloat16(), fmt, "rceil", transpose, None, False, False]
            yield [x.bfloat16(), fmt, "rceil", True, None, True, False]
            yield [x.to(FLOATS[i % 3]), fmt, "rceil", True, seed, i % 2 == 0, False]
            other = x.to(FLOATS[i % 2 * 2])
            yield [other, fmt, "rceil", False, None, False, True]
            if not block.nvfp4:
                yield [other, fmt, _OTHER_MODES[i % 3], i % 2 == 0, None, False, False]


def dequantize_mx(device: str) -> Iterator[Arguments]:
    one = tensor(device, 0.37)
    for rows, columns in SHAPES:
        for i, (fmt, block) in enumerate(block_formats.BLOCK_FORMATS.items()):
            size, across = block_formats.sizes(fmt, columns)
            scales = (torch.arange(rows * across, device=device) * 37 + 120).to(torch.uint8)
            scales = scales.view(rows, across)
            data = codes(device, (rows, size)).view(block.element.dtype)
            if block.nvfp4:
                scales = scales.view(torch.float8_e4m3fn)
            for dtype in (torch.bfloat16, FLOATS[i % 2 * 2]):
                yield [data, scales, one if block.nvfp4 else None, fmt, columns, dtype]


def pack(device: str) -> Iterator[Arguments]:
    for shape in PACKED:
        x = random(device, 1, shape)
        x[:3] = 0.0
        x[3], x[9, 0], x[13, 0], x[16, 0] = 0.1, math.nan, -math.inf, 1e-40
        offset = None
        for bits in (8, 4, 2):
            for dtype in FLOATS:
                yield [x.to(dtype), bits, 2**40 + 7, 2**33 + bits, offset]
                offset = tensor(device, [2**35 + 11], torch.int64) if offset is None else None


def unpack(device: str) -> Iterator[Arguments]:
    for n in map(math.prod, PACKED):
        ranges = random(device, 1, ((n + 127) // 128, 2)).bfloat16()
        ranges[3, 1], ranges[7, 0] = 0.0, math.nan
        for bits in (8, 4, 2):
            packed = codes(device, ((n * bits + 7) // 8,))
            for dtype in FLOATS:
                yield [packed, ranges, bits, [n], dtype]
