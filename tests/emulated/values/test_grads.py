"""unscale_ and grad_stats_: the references' bits, and their sums of squares."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import GRADS, SHAPES, WRITABLE, from_bits, name, normal, random_bits, random_list
from emulated.agreement import Agreement

INF, NAN = math.inf, math.nan
CHUNK = 32768  # csrc/cuda/common/tensor_list.cuh; in Triton 8 blocks of 2048
# Empty, one, primes, and around the packs (4 to 16), the blocks and the chunks.
SIZES = (0, 1, 2, 3, 7, 15, 17, 31, 33, 127, 129, 1009, 4097, CHUNK - 1, CHUNK, CHUNK + 1)


def check(
    agree: Agreement, grads: list[torch.Tensor],
    inv_scales: tuple[float | None, ...] = (0.3, 2.0**3, None), found: float = 0.0,
) -> list[float]:  # fmt: skip
    """found_inf after unscale_ and grad_stats_ at each scale, by turns with counts and without."""
    counts, sums = torch.full((len(grads), 4), -7), torch.full((len(grads),), NAN).double()
    flag, flags = torch.tensor(found), []
    for i, number in enumerate(inv_scales):
        inv_scale, given = None, None if i % 2 else counts
        if number is not None:
            inv_scale = torch.tensor(number)
            flags.append(agree("unscale_", [grads, inv_scale, flag, given])[2].item())
        flags.append(agree("grad_stats_", [grads, inv_scale, flag, sums, given])[2].item())
    return flags


LISTS: dict[str, Callable[[Agreement], list[list[torch.Tensor]]]] = {
    "empty": lambda _: [[], [torch.zeros(0)] * 3],
    "sizes": lambda agree: [
        [normal(n, d, seed=i) for i, n in enumerate(agree.affordable((n,) for n in SIZES))]
        for d in GRADS
    ],
    "chunks": lambda agree: [
        [normal(n, d) for n in ((49_153,), *agree.affordable([(3 * CHUNK + 5,), (300_001,)]))]
        for d in GRADS
    ],
    "layouts": lambda agree: [
        [layout(normal(shape, d, seed=7)) for shape in agree.some(SHAPES[::2], i) for d in GRADS]
        + [layout(normal((13, 17), d)) for d in GRADS]
        for i, layout in enumerate(WRITABLE)
    ],
    "zeros": lambda agree: [
        [torch.where(torch.arange(5000) % 3 == 0, 0, normal((5000,), d)) for d in GRADS]
    ],
    "mixed": lambda agree: [
        random_list(random.Random(0), n) for n in (1, 3, 60) if n < agree.count // 4
    ],
}


@pytest.mark.parametrize("kind", LISTS)
def test_unscale_and_grad_stats(agree: Agreement, kind: str) -> None:
    for grads in LISTS[kind](agree):
        assert not any(check(agree, grads, agree.few(0.3, None, 2.0**3)))


def test_unscale_and_grad_stats_of_whole_chunks(agree: Agreement) -> None:
    """Of one kind: no count runs over into the next."""
    size = CHUNK + 5 if agree.most > CHUNK else CHUNK // 2 + 5
    values = (0.0, -0.0, INF, -INF, NAN, 1.0)
    kinds = [torch.full((size,), x, dtype=d) for x in values for d in GRADS[::2]]
    tiny = [torch.full((size,), torch.finfo(d).smallest_normal / 2, dtype=d) for d in GRADS]
    check(agree, [*kinds, *tiny], (0.3,))


def test_grads_that_take_several_launches(agree: Agreement) -> None:
    """A launch has 32,764 bytes of arguments, 28 for a tensor."""
    grads = random_list(random.Random(1), min(agree.count, 1400), GRADS[:1])
    more = random_list(random.Random(2), min(agree.count, 40))
    assert not any(check(agree, [*grads, *more], (0.5,)))


@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_unscale_and_grad_stats_of_any_bits(agree: Agreement, dtype: torch.dtype) -> None:
    """And a flag that is set is never cleared. 1.0005 makes Inf of the largest FP16 number."""
    every = random_bits(1 << 14, dtype)
    if dtype.itemsize == 2 and agree.most >= 1 << 16:
        every = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    finite = every[every.isfinite()]
    scales = (1.0, 2.0**-16, 2.0**24, 1 / 3, 1.0005, 2.0**127, 2.0**-126, 0.0, INF, NAN)
    check(agree, [every, torch.zeros(0, dtype=dtype), finite], scales)
    check(agree, [finite], scales)
    for found in (1.0, 2.0):
        for grads in ([finite[finite.abs() < 1]], [], [finite[:0]]):
            assert check(agree, grads, (2.0**-16, None), found=found) == [found] * 3


@pytest.mark.parametrize("dtype", GRADS, ids=name)
@pytest.mark.parametrize("bad", [INF, -INF, NAN, "overflow"])
def test_unscale_finds_one_bad_element_anywhere(
    agree: Agreement, dtype: torch.dtype, bad: float | str
) -> None:
    """Also where the product alone overflows: the sum of squares sees the FP32 product, what is
    written its rounding to 16 bits."""
    overflow = bad == "overflow"
    for which, at in agree.few((-1, -1), (0, 0), (1, 17), (0, -1), (-1, 0), (-1, 1009)):
        sizes = (33, 40, *(n for (n,) in agree.affordable(((4099,), (98_309,)))))
        grads = [normal((n,), dtype, seed=n) for n in sizes]
        grads[which][at] = torch.finfo(dtype).max if overflow else bad
        found = check(agree, grads, (4.0,))
        assert found == [1.0, 0.0 if overflow and dtype == torch.float16 else 1.0], (which, at)


def test_squares_beyond_fp32_and_an_infinite_inverse_scale(agree: Agreement) -> None:
    """Inf, and not the NaN of 0 * Inf behind the end of a list's last block."""
    large = [torch.empty(0), torch.full((70,), 3e38)]
    ones = [torch.ones(n, dtype=d) for n, d in zip((1, 4099, 33), GRADS, strict=False)]
    for grads, number, want in ((large, 1.0, [0.0, 70 * 9e76]), (ones, INF, [INF] * 3)):
        inv_scale, flag, sums = torch.tensor(number), torch.tensor(0.0), torch.zeros(3).double()
        after = agree("grad_stats_", [grads, inv_scale, flag, sums[: len(grads)], None])
        assert after[2].item() == float(number == INF)
        assert after[3].tolist() == pytest.approx(want, rel=1e-6)
