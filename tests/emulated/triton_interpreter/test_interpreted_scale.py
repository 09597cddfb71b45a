"""The kernels of a few scalars (scales, clipping) in Triton's interpreter, bit for bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import FP8, WRITABLE, name, normal, random_bits
from emulated.ops import launcher
from emulated.triton_interpreter.helpers import INF, NAN, agree, f32, no_warnings

pytestmark = no_warnings


@pytest.mark.parametrize("to", [*FP8, torch.float16, torch.bfloat16], ids=name)
def test_scale_from_amax(to: torch.dtype) -> None:
    awkward = f32(0.0, -0.0, 1e-45, 1e-38, 1.0, 3.0, 448.0, 3.4e38, INF, NAN)
    amax = torch.cat([awkward, random_bits(3000, torch.float32).abs()])
    for margin, power_of_two in itertools.product((-64, 0, 3, 64), (False, True)):
        previous = torch.linspace(0.1, 9.0, amax.numel())
        args = (to, margin, power_of_two)
        agree("scale_from_amax_", lambda a=args, p=previous: [
            p.clone(), torch.zeros_like(amax), amax, *a])  # fmt: skip


def test_scale_from_amax_layouts() -> None:
    for layout, shape in itertools.product(WRITABLE, ((), (0,), (3, 5))):
        agree("scale_from_amax_", lambda layout=layout, shape=shape: [
            *(layout(normal(shape, torch.float32, seed).abs()) for seed in range(3)),
            torch.float8_e4m3fn, 1, True,
        ])  # fmt: skip


def test_inv_scale_and_clip_coef() -> None:
    for x in [*random_bits(300, torch.float32), f32(0.0), f32(INF), f32(NAN), f32(65536.0)]:
        agree("inv_scale", lambda x=x: [x.reshape(1)])
    sums = [*random_bits(40, torch.float64).abs(), *normal((10,), torch.float64).square() * 9]
    special = torch.tensor([0.0, INF, NAN, 1.0], dtype=torch.float64)
    for x, max_norm in itertools.product([*sums, *special], (1.0, 0.3, 1e300, INF)):
        agree("clip_coef", lambda x=x, n=max_norm: [x, n])


def test_clip_coef_of_many_sums() -> None:
    """Small integers, whose sum is exact in any order; of others, one order and so one result."""
    for count in (0, 1, 2, 1023, 1024, 1025, 5000):
        exact = torch.arange(count, dtype=torch.float64) % 97
        agree("clip_coef", lambda exact=exact: [exact, 3.0])
        sums, run = normal((count,), torch.float64).square(), launcher("clip_coef")
        assert run(sums, 0.3).item() == run(sums, 0.3).item()
        assert run(sums, 0.3).item() == pytest.approx(
            min(1.0, 0.3 / (math.sqrt(math.fsum(sums.tolist())) + 1e-6)), rel=2**-23
        )


def agree_on_update_scale(
    scale: float, growth: int, left: int, found: float, underflow: float | None,
    rule: tuple[Any, ...],
) -> None:  # fmt: skip
    def make() -> list[Any]:
        trackers = [torch.tensor([t], dtype=torch.int32) for t in (growth, left)]
        counters = torch.tensor([2**40, 3, 4])
        share = None if underflow is None else f32(underflow)
        return [f32(scale).reshape(1), *trackers, counters, f32(found), share, *rule]

    agree("update_scale_", make)


@pytest.mark.parametrize("scale", [65536.0, 1.0, 2.0**-24, 2.0**-26, 3e38, 1e-45, INF, NAN])
def test_update_scale(scale: float) -> None:
    rules = (
        (2.0, 0.5, 1, 2.0**-24, INF, 1, 1.0),
        (2.0, 0.5, 3, 0.0, 2.0**16, 2, 1.0),
        (1.1, 0.9, 3, 2.0**-24, 2.0**17, 2, 1.0),
    )
    founds = (0.0, 1.0, 2.0, NAN)
    for found, rule, growth, left in itertools.product(founds, rules, (0, 2), (0, 1, 2)):
        agree_on_update_scale(scale, growth, left, found, None, rule)


def test_update_scale_on_underflow() -> None:
    """Early growth is from a twentieth of the interval on: at 2 of 40, not at 1; in 64 bits."""
    shares, thresholds = (0.0, 0.3, 0.31, 1.0, NAN), (0.0, 0.3, 1.0)
    for underflow, interval, growth, threshold, found in itertools.product(
        shares, (3, 40, 2**31 - 1), (0, 1, 2**30), thresholds, (0.0, 1.0)
    ):
        rule = (2.0, 0.5, interval, 0.0, INF, 1, threshold)
        agree_on_update_scale(1024.0, growth, 1, found, underflow, rule)
