"""Stochastic rounding and remainders: the random bits, the two neighbours, and nothing lost."""

from __future__ import annotations

import independent as ind
import numpy as np
import torch
from cases import for_each, from_bits, random_bits

from mixprec.ops import sgd_
from mixprec.ops._reference import rounding

# Random123's known answers for Philox4x32-10: counter, key (low word first), result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def store(values: torch.Tensor, **random: object) -> torch.Tensor:
    """`values` (fp32) rounded to a bf16 param by the kernel: p - (p - value) * 1, exactly."""
    param = torch.zeros(values.shape, dtype=torch.bfloat16)
    options = {"stochastic_rounding": True, "indices": [0], **random}
    sgd_([param], [-values], [], [], torch.zeros(1), lr=1.0, **options)
    return param


@for_each("counter, key, want", KNOWN)
def test_philox_known_answers(counter: tuple, key: tuple, want: tuple) -> None:
    seed = key[0] | key[1] << 32
    got = rounding.philox(tuple(torch.tensor([c]) for c in counter), seed)
    assert got.tolist() == [list(want)]
    assert ind.philox(counter, seed) == list(want)


def test_random_bits_are_those_of_the_docs() -> None:
    for count, seed, step, index, stream in ((1, 0, 1, 0, 0), (37, 2**62 + 3, 2**24, 2**30 - 1, 2)):
        shape = torch.Size((count,))
        got = rounding.random_bits(shape, seed, torch.tensor(float(step)), index, stream)
        assert got.tolist() == ind.random16(count, seed, step, index, stream).tolist()


def test_only_the_two_neighbours_and_on_average_the_value(backend: str) -> None:
    low, high = 1.0, 1.0 + 2.0**-7
    for part in (0.0, 2.0**-16, 0.25, 0.5, 0.9, 1 - 2.0**-16):
        value = low + part * (high - low)
        got = store(torch.full((40_000,), value), seed=3).float()
        assert set(got.tolist()) <= ({low} if part == 0.0 else {low, high})
        share = (got == high).double().mean().item()
        # six standard deviations of the mean of 40,000 draws
        assert abs(share - part) <= 6 * max(part * (1 - part), 1e-6) ** 0.5 / 200


def test_split_and_join_lose_nothing() -> None:
    edges = [0, 0x8000, 0x7FFF, 0x18000, 0x17FFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000]
    edges += [0x7F7F7FFF, 0x7F800000, 0x00000001, 0x00008000, 0x007FFFFF]
    codes = np.array(edges + [e | 0x80000000 for e in edges], np.uint32)
    masters = torch.cat([from_bits(codes, torch.float32), random_bits(1 << 20, torch.float32)])
    param, remainder = rounding.split_master(masters)
    ind.assert_same_bits(rounding.join_master(param, remainder), masters)
    finite = masters.abs() < 3e38
    nearest = (param.float().double() - masters.double()).abs()[finite]
    even = (masters.bfloat16().float().double() - masters.double()).abs()[finite]
    assert torch.equal(nearest, even), "the param is not the nearest"
    away = param.float().abs() >= masters.bfloat16().float().abs()
    assert away[finite].all(), "a tie went towards zero"
