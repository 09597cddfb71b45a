"""The kernel that finishes a split-K GEMM, run on the CPU, bit for bit the formula."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import independent as ind
import pytest
import torch
from cases import WIDE, name, normal
from emulated.shim import runner
from emulated.shim.gemm_args import Epilogue, ScaleView, epilogue
from hypothesis import given
from hypothesis import strategies as st


class FinishCall(ctypes.Structure):
    """gemm_finish.cpp: struct FinishCall."""

    _fields_ = (
        ("partial", ctypes.c_void_p),
        ("splits", ctypes.c_int), ("m", ctypes.c_int), ("n", ctypes.c_int),
        ("epilogue", Epilogue), ("sms", ctypes.c_int),
    )  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    source = runner.HERE / "gemm_finish.cpp"
    return ctypes.CDLL(str(runner.compile_(["-O2", "-shared", runner.SCHEDULER, source], ".so")))


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
) -> tuple[ScaleView, torch.Tensor, torch.Tensor]:
    """As the kernel takes it, its memory, and the scale of every row of a, or column of b."""
    if rows_per is None:
        return ScaleView(), torch.ones(0), torch.ones(length)
    count = -(-length // rows_per) if rows_per else 1
    scale = normal((count,), torch.float32, seed=seed).abs() + 0.25
    view = ScaleView(scale.data_ptr(), min(rows_per, 1), 0, 7 if rows_per == 128 else 0)
    each = scale.repeat_interleave(rows_per)[:length] if rows_per else scale.expand(length)
    return view, scale, each


def check(case: Case, sms: int = 2) -> None:
    """Runs the kernel between guard bands, and compares every byte."""
    splits, m, n = case.splits, case.m, case.n
    partial = runner.misaligned((splits, m, n), torch.float32, 0)
    partial.copy_(normal((splits, m, n), torch.float32, seed=m + n))
    bias = None if case.bias is None else normal((n,), case.bias, seed=3)
    a_view, _a_memory, of_row = scale_of(m, case.a_rows_per, 1)
    b_view, _b_memory, of_column = scale_of(n, case.b_rows_per, 2)
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

    finish = epilogue(whole, pitch, case.accumulate, bias, a_view, b_view)
    call = FinishCall(partial.data_ptr() if splits else None, splits, m, n, finish, sms)
    before = whole.clone()
    assert library().finish(ctypes.byref(call)) == 0
    assert torch.equal(whole.view(torch.uint8), want_whole.view(torch.uint8)), case

    if m * n and splits == 1:  # the same functions, where the sum is in a register
        whole.copy_(before)
        for row, col in {(0, 0), (m - 1, n - 1), (m // 2, n // 3)}:
            library().store_one(
                ctypes.byref(call), ctypes.c_int64(row), ctypes.c_int64(col),
                ctypes.c_float(partial[0, row, col].item()),
            )  # fmt: skip
            ind.assert_same_bits(out[row, col], want[row, col], f"({row}, {col}) of {case}")


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
    call = FinishCall(partial.data_ptr(), 2, 1, 8, epilogue(out, 8), 1)
    assert library().finish(ctypes.byref(call)) == 0
    ind.assert_same_bits(out[0], partial.sum(0)[0], "inf, nan and overflow")
    assert out[0].isnan().tolist() == [False, False, True] + [False] * 5


scales = st.sampled_from((None, 0, 1, 128))


@given(
    st.builds(
        Case, st.integers(0, 5), st.integers(1, 9), st.integers(1, 40), st.sampled_from(WIDE),
        st.just(False), st.sampled_from((None, *WIDE)), scales, scales, st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_any_case(case: Case, sms: int) -> None:
    check(case, sms)
