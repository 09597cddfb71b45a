"""quantize_mx against other encoders. test_values.py has the values, and those of dequantize_mx."""

from __future__ import annotations

import math

import independent as ind
import independent_mx as mx
import numpy as np
import pytest
import torch
from cases import for_each, normal

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, SCALE_MODES, name_of
from mixprec.ops.quantize_mx import quantize_mx_op as quantize_mx


def codes(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint8).numpy()


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
        data, _, scale, *_ = quantize_mx(x, fmt, mode, False, None, False, True)
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
