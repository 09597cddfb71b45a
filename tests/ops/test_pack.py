"""pack and unpack: groups of 128 in 8, 4 or 2 bits, rounded at random without bias."""

from __future__ import annotations

import itertools
import math

import independent as ind
import numpy as np
import pytest
import torch
from cases import WIDE, for_each, normal, pairwise, random_bits
from hypothesis import given
from hypothesis import strategies as st

from mixprec.ops import pack, unpack
from mixprec.ops.pack import BITS, GROUP


def both(
    x: torch.Tensor, bits: int, seed: int = 0, counter: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes, ranges and what they are unpacked to."""
    codes, ranges = pack(x, bits, seed=seed, counter=counter)
    return codes, ranges, unpack(codes, ranges, bits, x.shape, x.dtype)


def spread(ranges: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """minimum and step for each element of x, in FP64."""
    wide = ranges.double().repeat_interleave(GROUP, 0)[: x.numel()]
    return wide[:, 0].view(x.shape), wide[:, 1].view(x.shape)


def assert_close(x: torch.Tensor, y: torch.Tensor, ranges: torch.Tensor, bits: int) -> None:
    """Within a step, but for one rounding to x's dtype; and in the range that is stored."""
    minimum, step = spread(ranges, x)
    exact, unit = x.double(), torch.finfo(x.dtype).eps
    assert (exact >= minimum).all()
    top = minimum + step * (2**bits - 1)
    assert (exact <= top + top.abs() * 2.0**-24).all()
    slack = unit * torch.maximum(y.double().abs(), exact.abs()) + 2.0**-24 * minimum.abs()
    assert ((y.double() - exact).abs() <= step + slack).all()


@given(
    count=st.integers(1, 700),
    seed=st.integers(-(2**63), 2**63 - 1),
    counter=st.integers(-(2**63), 2**63 - 1),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(WIDE),
    exponent=st.integers(-126, 120),
    shift=st.sampled_from([0.0, 1.0, -3.0, 1e5]),
)
def test_any_magnitude(
    count: int, seed: int, counter: int, bits: int, dtype: torch.dtype, exponent: int, shift: float
) -> None:
    x = ((normal((count,), torch.float64) + shift) * 2.0**exponent).to(dtype)
    x = torch.where(x.isfinite() & (x.abs() < torch.finfo(dtype).max / 4), x, 0.0)
    codes, ranges, y = both(x, bits, seed, counter)
    assert (codes.shape, len(ranges)) == ((-(-count * bits // 8),), -(-count // GROUP))
    assert_close(x, y, ranges, bits)


@for_each("bits, dtype", [*itertools.product(BITS, WIDE)])
def test_every_bit_pattern(bits: int, dtype: torch.dtype) -> None:
    """Groups with Inf or NaN are NaN, and no other one is touched by them."""
    x = random_bits(1 << 14, dtype).view(-1, GROUP) / 4  # their range is finite
    x[::2] = torch.where(x[::2].isfinite(), x[::2], 0.0)
    x[-1, 3] = math.inf
    assert both(x.view(-1)[:-84], bits)[2][-44:].isnan().all()  # the group that is not full
    codes, ranges, y = both(x, bits)
    finite = x.isfinite().all(1)
    assert finite.sum() >= len(x) // 2
    assert torch.equal(y.isnan().all(1), ~finite)
    assert torch.equal(y.isnan().any(1), ~finite)
    assert (ranges[~finite, 1] == 0).all()
    assert (codes.view(len(x), -1)[~finite] == 0).all()


@for_each("bits", BITS)
def test_what_is_kept_exactly(backend: str, bits: int) -> None:
    for dtype, value in itertools.product(WIDE, (0.0, -0.0, 1.0, -3.5, 2.0**-14, 448.0)):
        x = torch.full((200,), value, dtype=dtype)
        assert torch.equal(both(x, bits)[2], x)
    integers = torch.arange(1000) % 2**bits
    integers[::9], integers[1::9] = 0, 2**bits - 1
    for first, unit in ((0.0, 1.0), (-4.0, 2.0), (2.0**-20, 2.0**-20)):
        x = first + integers * unit
        assert torch.equal(both(x, bits, seed=5)[2], x)
    constant = torch.full((200,), 0.1)
    y = both(constant, bits)[2]
    assert (y - constant).abs().max() <= 0.1 * 2.0**-7 / (2**bits - 1) * 1.01


@for_each("bits", BITS)
def test_ranges_at_the_limits(backend: str, bits: int) -> None:
    """A range that FP32 cannot hold is NaN, not Inf; the largest FP16 numbers stay finite."""
    largest = torch.finfo(torch.float32).max
    for low, high in ((-largest, largest), (0.0, largest), (-largest, 0.0), (-2.5e38, 2.5e38)):
        y = both(torch.tensor([low, high] * 64), bits)[2]
        assert y.isnan().all()
    for low, high in ((-1e38, 1e38), (0.0, 1.5e38)):
        assert both(torch.tensor([low, high] * 64), bits)[2].isfinite().all()
    for dtype in (torch.float16, torch.bfloat16):
        most = torch.finfo(dtype).max if dtype == torch.float16 else 1.5e38
        for seed in range(20):
            x = torch.linspace(-most, most, 128, dtype=torch.float64).to(dtype)
            assert both(x, bits, seed)[2].isfinite().all()


def test_flushing_subnormal_numbers_changes_nothing() -> None:
    tiny = torch.tensor(
        [2.0**-140, -(2.0**-130), 2.0**-126, -(2.0**-126), 0.0, 2.0**-149, 2.0**-90]
    )
    rows = [tiny, -tiny, tiny.abs(), -tiny.abs(), tiny[:2], tiny[-2:], tiny * 2.0**20]
    cases = [row.repeat(64)[:GROUP] for row in rows]
    plain = [pack(x, bits) for x in cases for bits in BITS]
    assert torch.set_flush_denormal(True), "this processor cannot flush"
    try:
        flushed = [pack(x, bits) for x in cases for bits in BITS]
        values = [unpack(*p, 8, (GROUP,)) for p in flushed[::3]]
    finally:
        torch.set_flush_denormal(False)
    for ours, theirs in zip(plain, flushed, strict=True):
        assert torch.equal(ours[0], theirs[0])
        ind.assert_same_bits(ours[1], theirs[1])
    for p, value in zip(plain[::3], values, strict=True):
        ind.assert_same_bits(unpack(*p, 8, (GROUP,)), value)


@for_each("bits, fraction", pairwise(BITS, (0.0011, 0.25, 0.5, 0.7503, 0.999)))
def test_unbiased(bits: int, fraction: float) -> None:
    """10^6 elements so far between two codes; 8 random bits alone would be too coarse."""
    levels, draws = 2**bits - 1, 8000
    x = torch.full((draws, GROUP), 1.0 + fraction)
    x[:, 0], x[:, 1] = 0.0, levels
    codes, ranges = pack(x, bits, seed=11, counter=bits)
    assert torch.equal(ranges, torch.tensor([0.0, 1.0]).bfloat16().expand(draws, 2))
    up = unpack(codes, ranges, bits, x.shape)[:, 2:].double() - 1.0
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    # Elements of a group share 8 bits: the deviation is that of the groups' sums.
    sums = up.sum(1) - 126 * fraction
    assert abs(sums.mean().item()) < 4 * sums.std().item() / math.sqrt(draws) + 126 * 2.0**-16
    # That of independent elements, and of the part of 1/256 that all of a group get or do not.
    shared = fraction * 256 % 1
    variance = 126 * fraction * (1 - fraction) + (126 / 256) ** 2 * shared * (1 - shared)
    assert sums.var().item() == pytest.approx(variance, rel=0.1)


def test_seed_and_counter() -> None:
    x = normal((4, 300), torch.float32)
    first = pack(x, 4, seed=1, counter=2)[0]
    assert torch.equal(pack(x.clone(), 4, seed=1, counter=2)[0], first)
    assert torch.equal(pack(x.view(-1)[:512], 4, seed=1, counter=2)[0], first[:256])
    for seed, counter in ((1, 3), (2, 2), (1 + 2**32, 2), (1, 2 + 2**32), (-1, 2), (1, -2)):
        different = pack(x, 4, seed=seed, counter=counter)[0] != first
        assert different.float().mean() > 0.4


def test_layout_of_the_codes() -> None:
    for bits in BITS:
        x = (torch.arange(12) * 7 % 2**bits).float()
        x[:2] = torch.tensor([0.0, 2**bits - 1])
        codes, _ = pack(x, bits)
        number = sum(int(v) << (i * bits) for i, v in enumerate(x.tolist()))
        assert int.from_bytes(np.asarray(codes).tobytes(), "little") == number
