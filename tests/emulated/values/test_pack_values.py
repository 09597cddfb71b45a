"""pack and unpack, bit for bit the references."""

from __future__ import annotations

import math

import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, name, normal, random_bits
from emulated.agreement import Agreement

BITS = (8, 4, 2)
# Around the runs of a thread, the groups, and the blocks of threads.
SHAPES = ((0,), (), (1,), (15,), (17,), (127,), (128,), (129,), (3, 5, 67), (4095,), (4097,))
LARGE = ((8193,), (98309,), ((1 << 19) + 1,))

every_dtype = pytest.mark.parametrize("dtype", WIDE, ids=name)
every_bits = pytest.mark.parametrize("bits", BITS)


def round_trip(
    agree: Agreement, x: torch.Tensor, bits: int, seed: int = 1, offset: int | None = None
) -> None:
    added = None if offset is None else torch.tensor([offset])
    x, *_ = agree("pack", [x, bits, seed, 2**33 + bits, added])
    codes, ranges = agree.want("pack")(x, bits, seed, 2**33 + bits, None)
    agree("unpack", [codes, ranges, bits, list(x.shape), x.dtype])


@every_bits
@every_dtype
def test_packed_shapes(agree: Agreement, dtype: torch.dtype, bits: int) -> None:
    for i, shape in enumerate(agree.affordable((*SHAPES, *LARGE))):
        offset = (None, 1, -1, 2**63 - 1)[i % 4]
        round_trip(agree, normal(shape, dtype, seed=i), bits, i - 2**40, offset)


@every_bits
@every_dtype
def test_packing_every_kind_of_number(agree: Agreement, dtype: torch.dtype, bits: int) -> None:
    """Any bits, mostly groups with NaN; groups of one binade; single groups that are special."""
    bad = random_bits(4096, dtype)
    finite = torch.where(bad.isfinite(), bad, 0)
    for x in (bad, finite, finite.sort().values):
        round_trip(agree, x, bits)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    groups = torch.zeros(12, 128)
    groups[1], groups[2], groups[3, 5], groups[4, :7] = -0.0, 0.1, tiny, -tiny
    groups[5, 0], groups[6, 127], groups[7, 64] = math.inf, -math.inf, math.nan
    groups[8] = torch.arange(128.0)
    groups[9] = torch.linspace(-largest, largest, 128, dtype=torch.float64)
    groups[10] = groups[9] / 2
    groups[11] = 1000.0 + groups[8] * 2.0**-14
    round_trip(agree, groups.to(dtype), bits)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_packing_layouts(agree: Agreement, layout: Layout) -> None:
    round_trip(agree, layout(normal((13, 37), torch.bfloat16)), 4)


@every_bits
def test_unpacking_any_ranges(agree: Agreement, bits: int) -> None:
    """unpack of what pack never makes: the kernels still agree."""
    ranges = random_bits(2 * 10, torch.bfloat16).view(10, 2)
    codes = random_bits(1280 * bits // 8, torch.uint8)
    for dtype in WIDE:
        agree("unpack", [codes, ranges, bits, [1280], dtype])
