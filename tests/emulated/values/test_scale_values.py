"""The kernels of a few scalars (scales, clipping), bit for bit the references."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import FP8, WRITABLE, name, normal, random_bits
from emulated.agreement import Agreement

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.bfloat16], ids=name)
def test_scale_from_amax(agree: Agreement, dtype: torch.dtype) -> None:
    awkward = torch.tensor([0.0, -0.0, 1e-45, 2.0**-126, 1.0, 3.0, 448.0, 3.4e38, INF, NAN, -1.0])
    amax = torch.cat([awkward, random_bits(3000, torch.float32).abs()])
    for margin, power_of_two in itertools.product((-64, -2, 0, 3, 64), (False, True)):
        previous = torch.linspace(0.1, 9.0, amax.numel())
        args = [previous, torch.zeros_like(amax), amax, dtype, margin, power_of_two]
        agree("scale_from_amax_", args)


def test_scale_from_amax_layouts(agree: Agreement) -> None:
    for layout, shape in itertools.product(WRITABLE, ((), (0,), (3, 5))):
        three = [layout(normal(shape, torch.float32, seed).abs()) for seed in range(3)]
        agree("scale_from_amax_", [*three, torch.float8_e4m3fn, 1, True])


def test_inv_scale_and_clip_coef(agree: Agreement) -> None:
    for x in [*random_bits(300, torch.float32), *torch.tensor([0.0, INF, NAN, 65536.0])]:
        for shape in ((), (1,)):
            agree("inv_scale", [x.reshape(shape)])
    sums = [*random_bits(40, torch.float64).abs(), *normal((10,), torch.float64).square() * 9]
    special = torch.tensor([0.0, INF, NAN, 1.0, -1.0], dtype=torch.float64)
    for x, max_norm in itertools.product([*sums, *special], (1e-30, 0.3, 1.0, 1e300, INF)):
        agree("clip_coef", [x, max_norm])


def test_clip_coef_of_many_sums(agree: Agreement) -> None:
    """Small integers, whose sum is exact in any order; of others, one order and so one result."""
    for count in (0, 1, 2, 255, 256, 257, 1023, 1025, 5000):
        exact = torch.arange(count, dtype=torch.float64) % 97
        for max_norm in (0.1, 3.0, 77.7):
            agree("clip_coef", [exact.view(1, -1), max_norm])
        sums = normal((count,), torch.float64).square().to(agree.device)
        results = {agree.run("clip_coef")(sums, 0.3).item() for _ in range(4)}
        assert len(results) == 1
        want = min(1.0, 0.3 / (math.sqrt(math.fsum(sums.tolist())) + 1e-6))
        assert results.pop() == pytest.approx(want, rel=2**-23)


def agree_on_update_scale(
    agree: Agreement, scale: float, trackers: tuple[int, int], found: float,
    underflow: float | None, rule: tuple[float, ...],
) -> None:  # fmt: skip
    growth, left = (torch.tensor([t], dtype=torch.int32) for t in trackers)
    share = None if underflow is None else torch.tensor(underflow)
    state = [torch.tensor([scale]), growth, left, torch.tensor([2**40, 3, 4])]
    agree("update_scale_", [*state, torch.tensor(found), share, *rule])


@pytest.mark.parametrize("scale", [65536.0, 1.0, 2.0**-24, 2.0**-26, 3e38, 1e-45, INF, NAN])
def test_update_scale(agree: Agreement, scale: float) -> None:
    rules = (
        (2.0, 0.5, 1, 2.0**-24, INF, 1, 1.0),
        (2.0, 0.5, 3, 0.0, 2.0**16, 2, 1.0),
        (1.1, 0.9, 3, 2.0**-24, 2.0**17, 2, 1.0),
        (1.0, 1.0, 1, 4.0, 2.0, 3, 0.0),
    )
    trackers = tuple(itertools.product((0, 2), (0, 1, 2)))
    for found, rule, pair in itertools.product((0.0, 1.0, 2.0, NAN), rules, trackers):
        agree_on_update_scale(agree, scale, pair, found, None, rule)


def test_update_scale_on_underflow(agree: Agreement) -> None:
    """Early growth is from a twentieth of the interval on: at 2 of 40, not at 1; in 64 bits."""
    shares, thresholds = (0.0, 0.3, 0.31, 1.0, NAN), (0.0, 0.3, 1.0)
    for underflow, interval, growth, threshold, found in itertools.product(
        shares, (3, 40, 2**31 - 1), (0, 1, 2**30), thresholds, (0.0, 1.0)
    ):
        rule = (2.0, 0.5, interval, 0.0, INF, 1, threshold)
        agree_on_update_scale(agree, 1024.0, (growth, 1), found, underflow, rule)
