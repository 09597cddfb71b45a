"""The kernel that finishes a split-K GEMM, run on the CPU, bit for bit the formula."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import independent as ind
import pytest
import torch
from cases import WIDE, name, normal
from emulated.hopper.runner import Epilogue, epilogue, scale_view
from emulated.shim import runner


def finish(partial: torch.Tensor, epilogue: Epilogue, sms: int) -> None:
    sizes = (*partial.shape, ctypes.byref(epilogue), sms)
    assert runner.library().finish(ctypes.c_void_p(partial.data_ptr()), *sizes) == 0


class Case(NamedTuple):
    splits: int
    m: int
    n: int
    dtype: torch.dtype = torch.float32
    accumulate: bool = False
    bias: torch.dtype | None = None
    a_rows_per: int | None = None  # None: no scale; 0: one element
    b_rows_per: int | None = None
    gap: int = 0  # elements between two rows of out
    offset: int = 0  # elements from out's start to a 16-byte boundary


def scale_of(
    length: int, rows_per: int | None, seed: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The scale in memory, and that of every row of a, or column of b."""
    if rows_per is None:
        return None, torch.ones(length)
    if rows_per == 0:
        one = normal((), torch.float32, seed=seed).abs() + 0.25
        return one, one.expand(length)
    scale = normal((-(-length // rows_per),), torch.float32, seed=seed).abs() + 0.25
    return scale, scale.repeat_interleave(rows_per)[:length]


def check(case: Case, sms: int = 2) -> None:
    """Runs the kernel between guard bands, and compares every byte."""
    splits, m, n = case.splits, case.m, case.n
    partial = runner.misaligned((splits, m, n), torch.float32, 0)
    partial.copy_(normal((splits, m, n), torch.float32, seed=m + n))
    bias = None if case.bias is None else normal((n,), case.bias, seed=3)
    (a_scale, of_row), (b_scale, of_column) = (
        scale_of(length, rows_per, seed)
        for length, rows_per, seed in ((m, case.a_rows_per, 1), (n, case.b_rows_per, 2))
    )
    pitch = n + case.gap
    whole = runner.misaligned((m * pitch + 8,), case.dtype, case.offset)
    out = whole[: m * pitch].view(m, pitch)[:, :n]
    if case.accumulate:
        out.copy_(normal((m, n), case.dtype, seed=7))
    want_whole = whole.clone()
    want = want_whole[: m * pitch].view(m, pitch)[:, :n]

    value = torch.zeros(m, n)
    for part in partial:  # one after another: a sum in another order has other bits
        value = value + part
    value = value * of_row[:, None] * of_column
    if bias is not None:
        value = value + bias.float()
    want.copy_(want.float() + value if case.accumulate else value)

    shifts = (7 if per == 128 else 0 for per in (case.a_rows_per, case.b_rows_per))
    views = map(scale_view, (a_scale, b_scale), shifts)
    finish(partial, epilogue(whole, pitch, case.accumulate, bias, *views), sms)
    assert torch.equal(whole.view(torch.uint8), want_whole.view(torch.uint8)), case


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_every_kind_of_epilogue(dtype: torch.dtype) -> None:
    """Sums are taken in order and rounded once; scales, bias and both; any alignment and pitch;
    without partial sums the result is the bias or zeros. FP32 is accumulated into."""
    biases = (None, *WIDE)
    for splits in (1, 2, 3, 7):
        for m, n in ((0, 8), (3, 0), (1, 1), (1, 8), (5, 16), (7, 13), (64, 40), (3, 1031)):
            check(Case(splits, m, n, dtype))
    for i, per in enumerate(((0, 0), (1, 1), (128, 1), (1, 128), (None, 0), (128, 128))):
        for j, n in enumerate((264, 131)):
            for bias in (biases[(i + 2 * j) % 4], biases[(i + 2 * j + 1) % 4]):
                check(Case(2, 130, n, dtype, False, bias, *per))
    for bias in biases:
        for m, n in ((1, 1), (9, 24), (4, 5)):
            check(Case(0, m, n, dtype, False, bias, 1, 0))
    for gap in (0, 1, 4, 8):
        for offset in (0, 1, 4):
            check(Case(2, 6, 32, dtype, False, dtype, 1, 1, gap, offset))
    if dtype == torch.float32:
        check(Case(0, 5, 24, accumulate=True))
        for n in (4, 6, 48):
            check(Case(3, 5, n, accumulate=True, a_rows_per=1, b_rows_per=0))
            check(Case(3, 5, n, accumulate=True, gap=3))
    for m, n in ((65, 1024), (5, 1023)):  # more than one turn of each block
        check(Case(2, m, n, dtype, b_rows_per=1), sms=1)  # 8320 packs, 2048 threads


def test_non_finite_values_come_through() -> None:
    inf = float("inf")
    out = torch.empty(1, 8)
    partial = torch.tensor([[[inf, -inf, inf, 1e38, 3e38, 0, 1, 2]]] * 2)
    partial[1, 0, 2] = -inf
    finish(partial, epilogue(out, 8), 1)
    ind.assert_same_bits(out[0], partial.sum(0)[0], "inf, nan and overflow")
    assert out[0].isnan().tolist() == [False, False, True] + [False] * 5
