"""Examples of the products of groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .inputs import Arguments, integers, tensor
from .products import PAIRS

ROWS = ((48, 144, 32), (45, 143, 31))  # S, K, N
K = ((16, 304, 32), (15, 301, 31))  # M, S, N
POWERS = (1.0, 2.0, 0.5, 4.0)


def _powers(device: str, *shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return tensor(device, POWERS).repeat(-(-n // len(POWERS)))[:n].view(shape)


def _rows(device: str) -> Iterator[Arguments]:
    """a, b, their scales and offs, with an empty group and rows beyond the last."""
    offs = tensor(device, [3, 3, 38, 44], torch.int32)
    for s, k, n in ROWS:
        for a_dtype, b_dtype in PAIRS:
            a = integers(device, (s, k), a_dtype)
            b = integers(device, (4 * n, k), b_dtype).view(4, n, k).transpose(1, 2)
            yield [a, b, None, None, offs]
            yield [a, b, _powers(device, s, 1), _powers(device, 4, 1, n), offs]
        yield [a, b, _powers(device, s, 2), _powers(device, 4, 2, 1), offs]


def _k(device: str) -> Iterator[Arguments]:
    for m, s, n in K:
        offs = tensor(device, [128, 128, s - 4], torch.int32)
        for a_dtype, b_dtype in PAIRS:
            a, b = integers(device, (s, m), a_dtype).t(), integers(device, (s, n), b_dtype)
            yield [a, b, None, None, offs]
            yield [a, b, _powers(device, 3, m, 1), _powers(device, 3, 1, n), offs]
        yield [a, b, _powers(device, m, 3), _powers(device, 3, n), offs]


def gemm_grouped(device: str) -> Iterator[Arguments]:
    for operands in (*_rows(device), *_k(device)):
        dtype = operands[0].dtype
        yield [*operands, torch.bfloat16 if dtype.itemsize == 1 else dtype, False]


def gemm_grouped_accumulate(device: str) -> Iterator[Arguments]:
    for operands in _k(device):
        a, b, *_, offs = operands
        shape = (len(offs), a.shape[0], b.shape[1])
        yield [integers(device, shape, torch.float32), *operands]
