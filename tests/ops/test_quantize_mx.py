"""quantize_mx and dequantize_mx: no bias, other encoders, and the error of what comes back."""

from __future__ import annotations

import math

import independent as ind
import independent_mx as mx
import numpy as np
import pytest
import torch
from cases import for_each, normal

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, SCALE_MODES, name_of
from mixprec.ops.dequantize_mx import dequantize_mx_op as dequantize_mx
from mixprec.ops.quantize_mx import quantize_mx_op as quantize_mx


def codes(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint8).numpy()


@for_each("fmt", BLOCK_FORMATS)
def test_unbiased(fmt: str) -> None:
    """The mean of 10^6 draws; the largest element, which is exact, fixes the scale."""
    spec, size = mx.BLOCKS[fmt]
    table = ind.decode_table(spec)
    for i, part in enumerate((0.0007, 0.25, 0.5, 0.9)):
        low = table[[0, 1, spec.max_code - 1][i % 3]]
        high = table[int(np.flatnonzero(table == low)[0]) + 1]
        x = torch.full((1 << 20,), low + part * (high - low)).view(-1, size)
        x[:, 0] = spec.max
        if fmt == "nvfp4":
            x *= 448  # the scale of the tensor is then 1
        data, _, scale, *_ = quantize_mx(x, fmt, "rceil", False, torch.tensor([i]))
        drawn = codes(data)
        if spec.bits == 4:
            drawn = np.stack([drawn & 15, drawn >> 4], -1).reshape(-1, size)
        values = table[drawn[:, 1:]]
        assert len(np.unique(codes(scale))) == 1
        assert set(np.unique(values)) <= {low, high}
        up = values == high
        exact = (x[0, 1].item() / (448 if fmt == "nvfp4" else 1) - low) / (high - low)
        deviation = math.sqrt(exact * (1 - exact) / up.size)
        assert abs(up.mean() - exact) < 4 * deviation + 2.0**-16


@for_each("fmt", [f for f in BLOCK_FORMATS if f != "nvfp4"])
def test_elements_and_scales_equal_those_of_ml_dtypes_and_gfloat(fmt: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    gfloat = pytest.importorskip("gfloat")
    spec, size = mx.BLOCKS[fmt]
    suffix = "fn" if spec.name != "e5m2" else ""
    theirs = getattr(ml_dtypes, f"float{spec.bits}_{spec.name}{suffix}")
    form = getattr(__import__("gfloat.formats").formats, f"format_info_ocp_{spec.name}")
    x = normal((400, size), torch.float64).float() * torch.logspace(-100, 100, 400, base=2)[:, None]
    for mode in SCALE_MODES:
        data, _, scale, *_ = quantize_mx(x, fmt, mode, False, None)
        y = np.ldexp(x.double().numpy(), 127 - codes(scale).astype(int))
        y = np.clip(y, -spec.max, spec.max)
        want = join_codes(y.astype(theirs).view(np.uint8), spec)
        np.testing.assert_array_equal(codes(data), want)
        rounded = gfloat.round_ndarray(form, y, sat=True)
        want = join_codes(gfloat.encode_ndarray(form, rounded).astype(np.uint8), spec)
        np.testing.assert_array_equal(codes(data), want)
        if mode == "floor":
            emax = int(math.log2(spec.max))
            largest = [gfloat.compute_scale_amax(emax, row) for row in x.double().numpy()]
            np.testing.assert_array_equal(np.log2(largest) + 127, codes(scale)[:, 0])


def join_codes(values: np.ndarray, spec: ind.Spec) -> np.ndarray:
    return mx.join(values & 2 * spec.sign_bit - 1, spec)


def test_names() -> None:
    for name, block in BLOCK_FORMATS.items():
        assert block.element.name == mx.BLOCKS[name].spec.name
        assert block.block == mx.BLOCKS[name].size
        assert name_of(block.element, "nvfp4" if block.nvfp4 else "mx") == name
        assert name_of(block.element, "tensor") is None


@for_each("fmt", BLOCK_FORMATS)
def test_what_comes_back_is_close(backend: str, fmt: str) -> None:
    for shape in ((), (7,), (2, 3, 35), (4, 0, 3)):
        x = normal(shape, torch.float32)
        data, _, scale, _, of_tensor, _ = quantize_mx(x, fmt, "rceil", False, None)
        scale_of, columns = of_tensor if fmt == "nvfp4" else None, shape[-1] if shape else 1
        got = dequantize_mx(data, scale, scale_of, fmt, columns, torch.float32)
        assert got.shape == x.shape
        assert x.numel() == 0 or (got - x).norm() <= x.norm() / 4
