"""All 2^32 fp32 patterns through every cast, against the runs of codes that rounding makes.

The cast is monotone: over the fp32 patterns from 0 up, each code is one run of consecutive
patterns, which ends at the tie to the next code (a tie belongs to the even one). So the expected
codes of any chunk are the run's codes repeated, and no cast is needed to know them.
"""

from __future__ import annotations

import ctypes
import functools

import independent as ind
import numpy as np
import pytest
import torch
from cases import name

import mixprec

CHUNK = 1 << 20
INF_PATTERN = 0x7F800000


@functools.cache
def runs(spec: ind.Spec) -> tuple[np.ndarray, np.ndarray]:
    """(first pattern, code) of every run of the patterns 0 .. 0x7F800000, both ascending."""
    ties = ind.midpoints(spec).astype(np.float32)
    assert np.array_equal(ties.astype(np.float64), ind.midpoints(spec)), "a tie between patterns"
    codes = np.arange(len(ties) + 1)
    # Code i + 1 starts at the tie if it is even there, else one pattern after it.
    starts = np.append(0, ties.view(np.uint32).astype(np.int64) + codes[1:] % 2)
    if spec.bits == 8:  # finite values saturate
        starts[-1] = INF_PATTERN
        codes[-1] = spec.nan_code if spec.inf_code is None else spec.inf_code
    return starts, codes.astype(np.uint8 if spec.bits == 8 else np.int16)


def expected(spec: ind.Spec, first: int, count: int) -> torch.Tensor:
    """The codes of `count` non-NaN patterns from `first` on, from the runs they fall in."""
    starts, codes = runs(spec)
    edges = np.append(starts, first + count).clip(first, first + count)
    return torch.from_numpy(np.repeat(codes, np.diff(edges)))


@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_runs_agree_with_the_search_in_the_value_table(spec: ind.Spec) -> None:
    """The two independent ways to know a code agree (fast, so it runs by default)."""
    sampled = np.random.default_rng(0).choice(runs(spec)[0][1:-1], 50) - 2
    for first in (0, 1000, *sampled.tolist(), INF_PATTERN - 999):
        pattern = np.arange(first, first + 1000, dtype=np.uint32)
        got = expected(spec, first, 1000).numpy().view(spec.code_type)
        assert np.array_equal(got, ind.encode(pattern.view(np.float32), spec)), hex(first)


def give_back() -> None:
    """Freed memory to the system: glibc before 2.38 may not use aligned blocks again, so that a
    process that does nothing but cast grows by each result (glibc bug 14581)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_all_fp32_patterns(spec: ind.Spec) -> None:
    sign_bit = spec.sign_bit - (1 << spec.bits) if spec.bits == 16 else spec.sign_bit
    last_code = spec.max_code if spec.inf_code is None else spec.inf_code
    low = torch.arange(CHUNK, dtype=torch.int32)
    pattern = torch.empty_like(low)
    for first in range(0, 1 << 31, CHUNK):
        if first % (256 * CHUNK) == 0:
            give_back()
        numbers = min(max(INF_PATTERN + 1 - first, 0), CHUNK)  # the rest are NaN
        want = expected(spec, first, numbers) if numbers else None
        for negative in (False, True):
            torch.bitwise_or(low, first - (1 << 31) if negative else first, out=pattern)
            q = mixprec.quantize(pattern.view(torch.float32), spec.dtype, scale=1.0)
            got = q.data.view(torch.uint8 if spec.bits == 8 else torch.int16)
            where = f"{spec.name}: patterns from {first | negative << 31:#x}"
            if want is not None:
                signed = want | sign_bit if negative else want
                assert torch.equal(got[:numbers], signed), where
            if numbers < CHUNK:
                assert ((got[numbers:] & spec.nan_code) > last_code).all(), f"{where}: NaN lost"
                assert q.amax.isnan()
            else:
                assert q.amax.view(torch.int32).item() == first + CHUNK - 1, f"{where}: amax"
