"""dequantize_mx: every code with every scale, against the value tables."""

from __future__ import annotations

import itertools

import independent as ind
import independent_mx as mx
import numpy as np
import torch
from cases import WIDE, every_second, for_each, normal, transposed

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, sizes
from mixprec.ops.dequantize_mx import dequantize_mx_op as dequantize_mx
from mixprec.ops.quantize_mx import quantize_mx_op as quantize_mx


def stored(fmt: str, codes: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """data and scale_inv from codes."""
    kind = torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8
    data = torch.from_numpy(codes.astype(np.uint8)).view(BLOCK_FORMATS[fmt].element.dtype)
    return data, torch.from_numpy(scales.astype(np.uint8)).view(kind)


def check(
    fmt: str, codes: np.ndarray, scales: np.ndarray, columns: int, of_tensor: float | None = None
) -> None:
    data, scale_inv = stored(fmt, codes, scales)
    given = None if of_tensor is None else torch.tensor(of_tensor)
    want = mx.dequantize(codes, scales, of_tensor, fmt, columns)
    for dtype in WIDE:
        got = dequantize_mx(data, scale_inv, given, fmt, columns, dtype)
        assert got.is_contiguous()
        ind.assert_bits(got, ind.narrow(want, dtype), f"{fmt} {columns} {dtype}")


@for_each("fmt", BLOCK_FORMATS)
def test_every_code_with_every_scale(backend: str, poisoned: None, fmt: str) -> None:
    columns = 512  # all bytes of codes
    codes = np.arange(sizes(fmt, columns)[0]) % 256
    scales = np.arange(256)[:, None].repeat(sizes(fmt, columns)[1], 1)
    codes = codes[None].repeat(256, 0)
    check(fmt, codes, scales, columns)
    if fmt == "nvfp4":
        for of_tensor in (1.0, 0.37, 3e-38, 2.0**-126, 1e36):
            check(fmt, codes, scales, columns, of_tensor)


@for_each("fmt", BLOCK_FORMATS)
def test_shapes(backend: str, poisoned: None, two_threads: None, fmt: str) -> None:
    rng = np.random.default_rng(0)
    for rows, columns in itertools.product((0, 1, 70), (0, 1, 15, 16, 33, 1057)):
        size, across = sizes(fmt, columns)
        codes, scales = (rng.integers(0, 256, (rows, n)) for n in (size, across))
        check(fmt, codes, scales, columns)
    size, across = sizes(fmt, 20_001)  # in pieces
    check(fmt, rng.integers(0, 256, (2, size)), rng.integers(0, 256, (2, across)), 20_001)


@for_each("fmt", BLOCK_FORMATS)
def test_dimensions_and_strides(backend: str, fmt: str) -> None:
    for shape in ((), (7,), (2, 3, 35), (4, 0, 3)):
        x = normal(shape, torch.float32)
        data, _, scale, _, of_tensor, _ = quantize_mx(x, fmt, "rceil", False, None)
        columns = shape[-1] if shape else 1
        scale_of = of_tensor if fmt == "nvfp4" else None
        got = dequantize_mx(data, scale, scale_of, fmt, columns, torch.float32)
        assert got.shape == x.shape
        assert x.numel() == 0 or (got - x).norm() <= x.norm() / 4
        if data.dim() > 1:
            strided = [every_second(t.view(torch.uint8)).view(t.dtype) for t in (data, scale)]
            turned = [transposed(t.view(torch.uint8)).view(t.dtype) for t in (data, scale)]
            for parts in (strided, turned):
                again = dequantize_mx(*parts, scale_of, fmt, columns, torch.float32)
                assert torch.equal(again, got)
