"""The kernel that finishes a split-K GEMM, run on the CPU, bit for bit the formula."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from cases import WIDE, name, normal
from emulated.hopper.runner import epilogue, scale_view
from emulated.shim import runner

ROWS_PER = {None: 0, "one": 0, 1: 0, 128: 7}  # of a scale, and the shift of its view


def scale_of(length: int, per: Any, seed: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The scale in memory, and that of every row of a, or column of b."""
    if per is None:
        return None, torch.ones(length)
    shape = () if per == "one" else (-(-length // per),)
    scale = normal(shape, torch.float32, seed=seed).abs() + 0.25
    each = scale.expand(length) if per == "one" else scale.repeat_interleave(per)[:length]
    return scale, each


def check(
    shape: tuple[int, int, int], dtype: torch.dtype, *, accumulate: bool = False,
    bias: torch.dtype | None = None, per: Any = (None, None),
    gap: int = 0, offset: int = 0, sms: int = 2,
) -> None:  # fmt: skip
    """Runs the kernel between guard bands, and compares every byte. shape: parts of K, M, N; gap:
    elements between two rows of out; offset: of out from a 16-byte boundary."""
    _, m, n = shape
    partial = runner.misaligned(shape, torch.float32, 0)
    partial.copy_(normal(shape, torch.float32, seed=m + n))
    given = None if bias is None else normal((n,), bias, seed=3)
    scales = [scale_of(*one) for one in zip((m, n), per, (1, 2), strict=True)]
    whole = runner.misaligned((m * (n + gap) + 8,), dtype, offset)
    wanted = whole.clone()
    out, want = (t[: m * (n + gap)].view(m, n + gap)[:, :n] for t in (whole, wanted))
    if accumulate:
        out.copy_(normal((m, n), dtype, seed=7))
        want.copy_(out)

    value = torch.zeros(m, n)
    for part in partial:  # one after another: a sum in another order has other bits
        value = value + part
    value = value * scales[0][1][:, None] * scales[1][1]
    value = value if given is None else value + given.float()
    want.copy_(want.float() + value if accumulate else value)

    views = (scale_view(s, ROWS_PER[p]) for (s, _), p in zip(scales, per, strict=True))
    how = epilogue(whole, n + gap, accumulate, given, *views)
    sizes = (*shape, ctypes.byref(how), sms)
    assert runner.library().finish(ctypes.c_void_p(partial.data_ptr()), *sizes) == 0
    assert torch.equal(whole.view(torch.uint8), wanted.view(torch.uint8)), (shape, bias, per)


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_every_kind_of_epilogue(dtype: torch.dtype) -> None:
    """Sums are taken in order and rounded once; scales, bias and both; any alignment and pitch;
    without partial sums the result is the bias or zeros. FP32 is accumulated into."""
    biases = (None, *WIDE)
    for splits in (1, 2, 3, 7):
        for m, n in ((0, 8), (3, 0), (1, 1), (5, 16), (7, 13), (3, 1031)):
            check((splits, m, n), dtype)
    kinds = (("one", "one"), (1, 1), (128, 1), (1, 128), (None, "one"), (128, 128))
    for i, per in enumerate(kinds):
        for j, n in enumerate((264, 131)):
            check((2, 130, n), dtype, bias=biases[(i + 2 * j) % 4], per=per)
            check((2, 130, n), dtype, bias=biases[(i + 2 * j + 1) % 4], per=per)
    for bias in biases:
        check((0, 9, 24), dtype, bias=bias, per=(1, "one"))
    for gap in (0, 1, 4, 8):
        for offset in (0, 1, 4):
            check((2, 6, 32), dtype, bias=dtype, per=(1, 1), gap=gap, offset=offset)
    for n in (4, 6, 48) if dtype == torch.float32 else ():
        check((3, 5, n), dtype, accumulate=True, per=(1, "one"), gap=n % 4)
        check((0, 5, n), dtype, accumulate=True)
    for m, n in ((65, 1024), (5, 1023)):  # more than one turn of each block
        check((2, m, n), dtype, per=(None, 1), sms=1)  # 8320 packs, 2048 threads
