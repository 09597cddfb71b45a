"""Philox, whose bits rounding and packing use. test_values.py has what is rounded with them."""

from __future__ import annotations

import independent as ind
import torch
from cases import for_each

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


@for_each("counter, key, want", KNOWN)
def test_philox_known_answers(counter: tuple, key: tuple, want: tuple) -> None:
    seed = key[0] | key[1] << 32
    got = rounding.philox(tuple(torch.tensor([c]) for c in counter), seed)
    assert got.tolist() == [list(want)]
    assert ind.philox(counter, seed) == list(want)
