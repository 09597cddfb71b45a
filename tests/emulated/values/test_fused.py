"""norm_quantize, act_quantize and their backward ops, bit for bit the references."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, name, normal, random_bits
from emulated.agreement import Agreement

from mixprec.ops.act_quantize import KINDS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SCALE, ZERO = torch.tensor(3.7), torch.tensor(0.0)
# dtype, scale, transpose, granularity, power_of_two_scale
PLAIN = (F32, None, False, "tensor", True)
CASTS: tuple[tuple[Any, ...], ...] = (
    PLAIN, (E4M3, SCALE, True, "tensor", True),
    (E4M3, None, True, "tensor", False), (BF16, None, True, "tensor", True),
    (E5M2, ZERO, False, "tensor", True), (F16, SCALE, False, "tensor", True),
    (E4M3, None, False, "row", True), (E5M2, None, True, "row", False),
    (E4M3, None, True, "block1x128", True), (E4M3, None, False, "block1x128", False),
    (E5M2, None, True, "block128x128", True), (E4M3, None, True, "mx", True),
    (E5M2, None, False, "mx", True),
)  # fmt: skip
# Rows of one warp: of one run, several rounds, a part; whole packs and odd ones; tiles and bands.
SHAPES = ((2, 0, 3), (3, 0), (7,), (1, 257), (70, 144), (2, 67, 40), (131, 256), (5, 1040))

every_dtype = pytest.mark.parametrize("dtype", WIDE, ids=name)
every_cast = pytest.mark.parametrize("turn", range(len(CASTS)), ids=lambda i: f"cast{i}")


def agreements(agree: Agreement) -> tuple[Agreement, ...]:
    """With arrays that are aligned, and with others."""
    return (agree, dataclasses.replace(agree, dense=False)) if agree.dense else (agree,)


def shapes(agree: Agreement, turn: int) -> list[tuple[int, ...]]:
    few = agree.affordable(SHAPES)
    return few if agree.most > 1 << 16 else few[turn % 5 :: 5]


def fits(shape: tuple[int, ...], cast: tuple[Any, ...]) -> tuple[Any, ...]:
    return cast if len(shape) > 1 else (*cast[:2], False, *cast[3:])


@every_cast
@every_dtype
def test_norm(agree: Agreement, dtype: torch.dtype, turn: int) -> None:
    for i, shape in enumerate(shapes(agree, turn), start=turn + WIDE.index(dtype)):
        x, residual, g = (normal(shape, dtype, seed=seed) for seed in range(3))
        weight, bias, r = (normal(shape[-1:], WIDE[(i + j) % 3], seed=3 + j) for j in range(3))
        rows = x.shape[:-1].numel()
        mean, rstd = normal((rows,), F32, seed=6), normal((rows,), F32, seed=7).abs()
        for run in agreements(agree):
            forward = (1e-5, i % 2 == 0, *fits(shape, CASTS[turn]))
            some = [t if i % n else None for t, n in ((residual, 2), (weight, 4), (bias, 3))]
            run("norm_quantize", [x, *some, *forward])
            total = g.to(r.dtype) if i % 3 else None
            of_mean = mean if i % 2 == 0 else mean[:0]
            run("norm_backward", [g, x, some[1], of_mean, rstd, total, i % 4 < 2])


@every_cast
@every_dtype
def test_activations(agree: Agreement, dtype: torch.dtype, turn: int) -> None:
    for i, shape in enumerate(shapes(agree, turn), start=turn + WIDE.index(dtype)):
        x, up = (3 * normal(shape, dtype, seed=seed) for seed in range(2))
        g = normal(shape, WIDE[i % 3], seed=2)
        gate, cast = up if i % 2 else None, fits(shape, CASTS[turn])
        for run in agreements(agree):
            run("act_quantize", [x, gate, KINDS[i % 4], *cast])
            run("act_backward", [g, x, gate, KINDS[i // 2 % 4], *cast])


def test_large_arrays(agree: Agreement) -> None:
    """Also such that the CPU does not keep what it computes while it searches for the amax."""
    for shape, casts in zip(((193, 1031), (2049, 2048)), (CASTS, CASTS[2:3]), strict=True):
        row = (normal((1, 1031 if len(casts) > 1 else 64), BF16, seed=seed) for seed in range(3))
        x, other, g = (t.repeat(shape[0], shape[1] // t.shape[1]) for t in row)
        x[-1, -1], other[-1, -1], x[shape[0] // 2, 7] = 11.0, 700.0, -60.0
        ones = torch.ones(shape[0])
        for i, cast in enumerate(casts if agree.affordable([shape]) else ()):
            agree("norm_quantize", [x, other, None, None, 1e-5, i % 2 == 0, *cast])
            agree("norm_backward", [g, x, g[0], ones[:0], ones, other, True])
            agree("act_quantize", [x, other, KINDS[i % 4], *cast])
            agree("act_backward", [g, x, other, KINDS[i % 4], *cast])


@every_dtype
def test_any_bits(agree: Agreement, dtype: torch.dtype) -> None:
    """NaN and Inf, and values of every magnitude."""
    bits, g = (random_bits(1 << 12, dtype, seed=seed).view(16, 256) for seed in range(2))
    finite = torch.where(bits.isfinite(), bits, 0)
    for i, x in enumerate((bits, finite)):
        for mean in (True, False):
            agree("norm_quantize", [x, g if i else None, g[0], g[1], 0.0, mean, *PLAIN])
        ones = torch.ones(16)
        agree("norm_backward", [g, x, None, ones, ones, None, True])
        for kind in KINDS:
            for cast in (PLAIN, (E5M2, None, True, "mx", True)):
                agree("act_quantize", [x, None, kind, *cast])
                agree("act_backward", [g, x, x, kind, *cast])


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_gradients_of_norms(agree: Agreement, dtype: torch.dtype) -> None:
    """Long rows, which CUDA computes in one pass if they have 16 bits and are enough; and more
    bands than are added at once."""
    for i, shape in enumerate(agree.affordable(((67, 1024), (130, 808), (15, 8192), (4200, 8)))):
        g, x, total = (normal(shape, dtype, seed=seed) for seed in range(3))
        weight, mean = normal(shape[1:], WIDE[i % 3], seed=3), normal(shape[:1], F32, seed=4)
        rstd = normal(shape[:1], F32, seed=5).abs()
        for of_mean, residual, bias in ((mean, None, True), (mean[:0], total.half(), i % 2 == 0)):
            for run in agreements(agree):
                run("norm_backward", [g, x, weight, of_mean, rstd, residual, bias])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_layouts(agree: Agreement, layout: Layout) -> None:
    x, g = (layout(normal((13, 37), BF16, seed=seed)) for seed in range(2))
    cast, ones = (E4M3, None, True, "tensor", True), torch.ones(13)
    agree("norm_quantize", [x, g, normal((74,), F32)[::2], None, 1e-5, True, *cast])
    agree("norm_backward", [g, x, None, ones, ones, g, True])
    agree("act_quantize", [x, g, "silu", *cast])
    agree("act_backward", [g, x, x, "gelu", *cast])
