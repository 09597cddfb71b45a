"""gemm and gemm_accumulate_, each variant alone: exact where sums are exact.

What a variant refuses is left out with its reason printed; a test in which it refuses everything is
skipped. FP8 tensor cores keep 13 bits of a sum until it is promoted: with integers up to 4, each
128 products add up to less than 2^12.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import (
    FP8,
    LAYOUTS,
    WIDE,
    WRITABLE,
    contiguous,
    name,
    normal,
    small_integers,
    transposed,
)
from emulated.agreement import Variant, assert_bits

from mixprec.testing import assert_close, tolerance

PAIRS = (*((x, x) for x in (torch.float16, torch.bfloat16)), *itertools.product(FP8, FP8))
Pair = tuple[torch.dtype, torch.dtype]
formats = pytest.mark.parametrize("pair", PAIRS, ids=name)
ORDERS = tuple(itertools.product((contiguous, transposed), repeat=2))
# M, N, K: one element, less than a tile, odd, aligned over several tiles, K in many parts.
SHAPES = (
    (1, 1, 1), (1, 33, 40), (65, 1, 129), (37, 29, 7), (33, 257, 30), (1, 19, 300), (70, 9, 700),
    (48, 64, 160), (128, 128, 128), (255, 129, 257), (256, 512, 384), (16, 64, 2048),
    (16, 272, 4096), (64, 96, 8208), (515, 770, 1031), (1024, 1536, 2048), (2048, 3072, 1024),
)  # fmt: skip


def operands(m: int, n: int, k: int, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = small_integers((m, k), pair[0], 4, seed=m), small_integers((k, n), pair[1], 4, seed=-n)
    return a, b


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In FP64, exact for integers."""
    return a.double() @ b.double()


def check(got: torch.Tensor | None, want: torch.Tensor, what: str) -> None:
    """got is `want` (FP64, exact in FP32) after one rounding; zeros of either sign are zero."""
    if got is not None:
        assert_bits([got + 0.0], [want.float().to(got.dtype) + 0.0], f"{what}: ")


@formats
def test_small_integers(variant: Variant, poisoned: None, pair: Pair) -> None:
    for i, (m, n, k) in enumerate(variant.affordable(SHAPES)):
        a, b = operands(m, n, k, pair)
        want, acc = product(a, b), normal((m, n), torch.float32).round()
        for order_a, order_b in variant.some(ORDERS, i):
            left, right = order_a(a), order_b(b)
            what = f"{m} {n} {k} {name(order_a)} {name(order_b)}"
            for out in variant.some(WIDE, i + 1):
                got = variant.gemm(left, right, out_dtype=out)
                assert got is None or got.is_contiguous()
                check(got, want, what)
            check(variant.accumulate(acc, left, right), want + acc, what)
    variant.finish()


@pytest.mark.parametrize("layout_b", LAYOUTS, ids=name)
@pytest.mark.parametrize("layout_a", LAYOUTS, ids=name)
def test_all_layouts(variant: Variant, layout_a: Any, layout_b: Any) -> None:
    """Whatever lies between the elements is NaN, and what lies around acc stays as it is."""
    shapes, turn = ((17, 33, 40), (1, 19, 7), (37, 1, 70), (80, 48, 160)), LAYOUTS.index(layout_a)
    for pair, (m, n, k) in variant.some(
        tuple(itertools.product(PAIRS[1:4], shapes)), turn + 5 * LAYOUTS.index(layout_b)
    ):
        a, b = operands(m, n, k, pair)
        a, b = layout_a(a), layout_b(b)
        what = f"{pair} {m} {n} {k}"
        check(variant.gemm(a, b, out_dtype=torch.float32), product(a, b), what)
        acc = WRITABLE[turn % len(WRITABLE)](torch.ones(m, n))
        check(variant.accumulate(acc, a, b), product(a, b) + 1, f"{what}, accumulated")
    variant.finish()


SCALED = (
    (160, 208, 384), (150, 131, 300), (16, 256, 1024), (40, 131, 300), (8, 200, 1024),
    (150, 7, 300), (9, 140, 260), (1, 150, 257), (129, 1, 100),
)  # fmt: skip


def scale_shapes(size: int, K: int) -> dict[str, tuple[int, int]]:
    rows, chunks = -(-size // 128), -(-K // 128)
    return {
        "tensor": (1, 1), "row": (size, 1), "block1x128": (size, chunks),
        "block128x128": (rows, chunks), "rows of 128": (rows, 1),
    }  # fmt: skip


KINDS = tuple(scale_shapes(1, 1))
POWERS = torch.tensor([0.5, 1.0, 2.0])  # under which sums of small integers stay exact


def scaled(
    x: torch.Tensor, kind: str, seed: int, values: torch.Tensor = POWERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales for x [rows, K], drawn from `values`, and the elements of x times theirs, in FP64."""
    (rows, k), generator = x.shape, torch.Generator().manual_seed(seed % 2**31)
    shape = scale_shapes(rows, k)[kind]
    scale_inv = values[torch.randint(0, len(values), shape, generator=generator)]
    i, j = torch.arange(rows), torch.arange(k)
    of_row = i if shape[0] == rows else i // 128 if shape[0] > 1 else 0 * i
    each = scale_inv.double()[of_row][:, j // 128 if shape[1] > 1 else 0 * j]
    return scale_inv, x.double() * each


@pytest.mark.parametrize("out", WIDE, ids=name)
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids=name)
def test_scales_and_bias(variant: Variant, kinds: tuple[str, str], out: torch.dtype) -> None:
    """Every granularity with every other, and one rounding after all of it: sums have more bits
    than any 16-bit result."""
    turn = KINDS.index(kinds[0]) + KINDS.index(kinds[1]) + WIDE.index(out)
    shapes = variant.affordable(SCALED if variant.quick else SCALED[turn % 3 :: 3])
    for i, (m, n, k) in enumerate(shapes, start=turn):
        for pair in variant.some(PAIRS[1:4], i):
            a, b = operands(m, n, k, pair)
            (sa, left), (sb, right) = scaled(a, kinds[0], i), scaled(b.t(), kinds[1], i + 1)
            want, scales = left @ right.t(), {"a_scale_inv": sa, "b_scale_inv": transposed(sb).t()}
            for j, bias_dtype in enumerate(variant.some((None, *WIDE), i)):
                bias, total = None, want
                if bias_dtype is not None:
                    drawn = normal((2 * n,), torch.float64, seed=3) * 4096
                    bias = drawn.round().div(1024).to(bias_dtype)
                    bias = bias[::2] if (i + j) % 2 else bias[:n]
                    total = want + bias.double()
                got = variant.gemm(a, transposed(b), **scales, bias=bias, out_dtype=out)
                check(got, total, f"{m} {n} {k} {pair} bias {bias_dtype}")
            acc = small_integers((m, n), torch.float32, 4, seed=3)
            check(variant.accumulate(acc, a, b, **scales), want + acc, "gemm_accumulate_")
    variant.finish()


@pytest.mark.parametrize("out", WIDE, ids=name)
@formats
def test_random_and_one_signed_data(variant: Variant, pair: Pair, out: torch.dtype) -> None:
    """One-signed sums grow along K: an accumulator that is too short shows there. Two runs agree
    in every bit."""
    shapes = ((9, 33, 1500), (130, 140, 300), (64, 128, 4096), (256, 256, 4096), (9, 33, 4111))
    generator = torch.Generator().manual_seed(0)
    for (m, n, k), positive in itertools.product(variant.affordable(shapes), (False, True)):
        a = (torch.rand((m, k), generator=generator) - (0 if positive else 0.5)).to(pair[0])
        b = (torch.rand((k, n), generator=generator) - (0 if positive else 0.5)).to(pair[1])
        got = variant.gemm(a, transposed(b), out_dtype=out)
        if got is None:
            continue
        a64, b64 = a.double(), b.double()
        short = pair[0] in FP8 and variant.device.type == "cuda"
        bound = tolerance(a64 @ b64, a, b, out, fp8_tensor_core=short)
        assert_close(got, a64 @ b64, bound)
        assert_bits([variant.gemm(a, transposed(b), out_dtype=out)], [got], "two runs, ")
    variant.finish()


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[0] in FP8], ids=name)
def test_fast_accum_is_exact_where_the_short_accumulator_is(variant: Variant, pair: Pair) -> None:
    for m, n, k in variant.affordable(((64, 128, 128), (256, 256, 128), (37, 29, 70))):
        a, b = operands(m, n, k, pair)
        got = variant.gemm(a, transposed(b), out_dtype=torch.float32, fast_accum=True)
        check(got, product(a, b), f"{m} {n} {k}")
    variant.finish()


@formats
def test_infinities_and_nan_stay_in_their_rows_and_columns(variant: Variant, pair: Pair) -> None:
    """Of either operand, also where their product is NaN, and of the bias."""
    for i, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        a, b = operands(40, 36, 33, pair)
        a[3, 32], b[0, 35] = float("nan"), float("nan")
        if pair[0] != torch.float8_e4m3fn:  # which has no Inf
            a[39, 5] = bad
        if pair[1] != torch.float8_e4m3fn:
            b[32, i] = bad
        check(variant.gemm(a, b, out_dtype=WIDE[i]), product(a, b), f"{bad}")
        bias = torch.where(torch.arange(36) == 7, bad, 1.0)
        got = variant.gemm(a, b, bias=bias, out_dtype=WIDE[i])
        check(got, product(a, b) + bias.double(), f"{bad}, bias")
    variant.finish()


@formats
def test_empty_operands(variant: Variant, pair: Pair) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        got = variant.gemm(*operands(m, n, k, pair))
        assert got is None or got.shape == (m, n)
        variant.accumulate(torch.zeros(m, n), *operands(m, n, k, pair))
    a, b = operands(4, 2, 0, pair)
    bias, zeros = torch.tensor([1.0, 2.0 + 2.0**-12]), torch.zeros(4, 2).double()
    for out in WIDE:
        check(variant.gemm(a, b, out_dtype=out), zeros, "K = 0")
        check(variant.gemm(a, b, bias=bias, out_dtype=out), zeros + bias.double(), "K = 0, bias")
    check(variant.accumulate(torch.ones(4, 2), a, b), zeros + 1, "K = 0")
    variant.finish()
