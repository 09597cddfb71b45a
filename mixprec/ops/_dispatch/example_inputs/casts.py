"""Examples of quantize, dequantize and amax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .inputs import FLOATS, LOW, SHAPES, Arguments, awkward, codes, random, shifted, tensor

# Rows that a warp has to itself, and rows that take a block of threads.
ROWS = (*SHAPES, (16, 1040), (7, 1031))


def quantize(device: str) -> Iterator[Arguments]:
    for i, shape in enumerate(SHAPES):
        x = random(device, 0, shape)
        bad = x.clone()
        bad.view(-1)[: 9 * 7] = awkward(device)
        for j, dtype in enumerate(LOW):
            given = tensor(device, 0.0) if (i + j) % 2 else tensor(device, 1.0)
            yield [x if j < 2 else x.half(), dtype, None, True, "tensor", True]
            yield [x.bfloat16(), dtype, None, False, "tensor", False]
            yield [x if (i + j) % 2 else bad, dtype, given, False, "tensor", True]
        for dtype in LOW[:2]:
            yield [x.bfloat16(), dtype, None, True, "tensor", True]
            yield [x.bfloat16(), dtype, tensor(device, 2.0), True, "tensor", True]
    yield [shifted(awkward(device)), LOW[0], tensor(device, 1.0), False, "tensor", True]
    yield from _quantize_by_blocks(device)


def _quantize_by_blocks(device: str) -> Iterator[Arguments]:
    for shape in ROWS:
        x = random(device, 1, shape)
        x[0, 3], x[-1, -1], x[:, 200] = math.nan, math.inf, 0.0
        for dtype, source in zip(LOW[:2], (torch.float32, torch.bfloat16), strict=True):
            yield [x.to(source), dtype, None, False, "row", True]
            for granularity in ("row", "block1x128", "block128x128"):
                if shape in SHAPES:
                    yield [x.to(source), dtype, None, True, granularity, True]


def dequantize(device: str) -> Iterator[Arguments]:
    for shape in SHAPES:
        for i, dtype in enumerate(LOW):
            fp8 = dtype.itemsize == 1
            data = codes(device, shape).view(dtype) if fp8 else random(device, 0, shape).to(dtype)
            yield [data, tensor(device, 0.25), FLOATS[i % 3]]
        data = random(device, 1, shape).to(torch.float8_e5m2)
        for i, scales in enumerate(((shape[0], 1), (shape[0], 3), (2, 3))):
            yield [data, random(device, 2, scales).abs(), FLOATS[(i + 1) % 3]]


def amax(device: str) -> Iterator[Arguments]:
    for shape in SHAPES:
        for dtype in FLOATS:
            yield [random(device, 0, shape).to(dtype)]
    yield [shifted(awkward(device))]
