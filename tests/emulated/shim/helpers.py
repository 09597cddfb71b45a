"""Sizes and helpers that the tests of the shim share."""

from __future__ import annotations

import independent as ind
import torch
from emulated.shim import runner

CHUNK = 32768  # csrc/cuda/common/tensor_list.cuh
# Empty, one, primes, around the packs (4 to 16), the tiles (64, 128) and the chunks.
SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 127, 128, 129, 1009, CHUNK - 1, CHUNK, CHUNK + 1)
LONG = 3 * CHUNK + 5


def at_offset(x: torch.Tensor, by: int) -> torch.Tensor:
    """x, `by` elements after a 16-byte boundary and between NaN."""
    result = runner.misaligned(x.shape, x.dtype, by)
    return result.copy_(x)


def assert_lists(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        label = f"{what}[{i}], {one.dtype}"
        if one.dtype == torch.int16:
            assert torch.equal(one, two), label
        else:
            ind.assert_same_bits(one, two, label)
