"""pack and unpack of numbers of any magnitude, also where the processor flushes subnormal ones.
test_values.py has shapes, layouts and special values."""

from __future__ import annotations

import itertools

import independent as ind
import torch
from cases import WIDE, normal
from emulated.agreement import assert_bits
from hypothesis import given
from hypothesis import strategies as st

import mixprec
from mixprec.ops import pack, unpack
from mixprec.ops.pack import BITS, GROUP


def check(
    x: torch.Tensor, bits: int, seed: int, counter: int, offset: torch.Tensor | None = None
) -> None:
    """Kernels and references agree, and back again every element is within a step of x."""
    results = []
    for backend in ("cpp", "reference"):
        with mixprec.use_backend(backend):
            codes, ranges = pack(x, bits, seed=seed, counter=counter, offset=offset)
            results.append([codes, ranges, unpack(codes, ranges, bits, x.shape, x.dtype)])
    assert_bits(*results)
    step, y = ranges[:, 1].double().repeat_interleave(GROUP)[: len(x)], results[0][2].double()
    finite = y.isfinite()  # a range that FP32 cannot hold is NaN
    close = (y - x.double()).abs() <= step * 1.001 + x.abs().double() * torch.finfo(x.dtype).eps
    assert close[finite].all()


@given(
    count=st.integers(1, 700),
    seed=st.integers(-(2**63), 2**63 - 1),
    counter=st.integers(-(2**63), 2**63 - 1),
    offset=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(WIDE),
    exponent=st.integers(-126, 127),
    shift=st.sampled_from([0.0, 1.0, -3.0, 1e5]),
)
def test_any_magnitude(
    count: int,
    seed: int,
    counter: int,
    offset: int | None,
    bits: int,
    dtype: torch.dtype,
    exponent: int,
    shift: float,
) -> None:
    x = ((normal((count,), torch.float64) + shift) * 2.0**exponent).to(dtype)
    x = torch.where(x.isfinite(), x, 0.0)
    check(x, bits, seed, counter, None if offset is None else torch.tensor([offset]))


def test_an_offset_advances_the_counter() -> None:
    """What a graph's replays read from the device is what another counter gives."""
    x, offset = normal((1000,), torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    found = []
    for replay in range(3):
        found.append(pack(x, 4, seed=5, counter=7, offset=offset)[0])
        assert torch.equal(found[-1], pack(x, 4, seed=5, counter=7 + replay)[0])
        offset += 1
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_ranges_that_are_close_to_others() -> None:
    """high - low is rounded down, so that the next step is needed; low + span alone overflows."""
    for x, bits in itertools.product(([-2.0, 1 + 2.0**-23], [3e38, 3.4028234e38]), BITS):
        check(torch.tensor(x), bits, 0, 0)


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
