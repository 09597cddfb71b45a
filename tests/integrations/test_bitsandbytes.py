"""quantize_nf4 and dequantize_nf4 against bitsandbytes, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from nf4_cases import CASES, FILE, by_bitsandbytes, raw

from mixprec.ops.nf4 import VALUES, dequantize_nf4, dynamic_map, quantize_nf4

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="the package bitsandbytes is not installed"
)
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def compare(w: torch.Tensor, what: str) -> None:
    for double_quant in (True, False):
        want, decoded = by_bitsandbytes(w, double_quant)
        q = quantize_nf4(w, double_quant)
        got = dequantize_nf4(q, w.shape, w.dtype)
        for part, ours, theirs in zip(
            (*q._fields, "decoded"), (*q, got), (*want, decoded), strict=True
        ):
            if theirs is None:
                assert ours is None
            else:
                same = (raw(ours) == raw(theirs)).all()
                assert same, f"{what} {tuple(w.shape)} {w.dtype}: {part}"


def test_tables() -> None:
    """the 16 values of NF4 and the 256 of the scales"""
    functional = bitsandbytes.functional
    values = functional.get_4bit_type("nf4", device="cpu")
    assert torch.equal(torch.tensor(VALUES), values)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # torch rounds otherwise there
        assert torch.equal(torch.tensor(dynamic_map()), functional.create_dynamic_map())


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    """quantize_4bit and dequantize_4bit of NF4, with and without double quantization"""
    compare(CASES[case], case)


@pytest.mark.parametrize("dtype", WIDE)
def test_any_weights(dtype: torch.dtype) -> None:
    """the same of random shapes and magnitudes, and of any finite numbers"""
    choose = random.Random(str(dtype))
    g = torch.Generator().manual_seed(1)
    for _ in range(60):
        shape = choose.choice([1, 3, 33, 64, 130, 300]), choose.choice([1, 7, 64, 66, 100, 512])
        w = torch.randn(shape, generator=g)
        scale = torch.randn(shape[0], 1, generator=g) * choose.choice([0, 1, 4])
        w = (w * torch.exp2(scale) * choose.choice([1.0, 2.0**-10, 2.0**-20])).to(dtype)
        if choose.random() < 0.3:
            w = w * (torch.rand(shape, generator=g) < choose.choice([0.0, 0.01, 0.5]))
        compare(w, "random")
    bits = torch.randint(-(2**31), 2**31, (64, 64), generator=g, dtype=torch.int64)
    w = bits.to(torch.int32).view(torch.float32) * 2.0**-12  # whose sum does not overflow
    compare(w.to(dtype).nan_to_num(0.0, 1.0, -1.0), "bits")


def test_version() -> None:
    """the version that the expected values of tests/ops/measured/nf4.npz are of"""
    import numpy as np

    assert str(np.load(FILE)["version"]) == "0.50.2"
