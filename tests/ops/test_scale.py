"""The scalar ops: amax to scale, 1 / scale, the clip factor, the loss scale's update."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import independent as ind
import numpy as np
import pytest
import torch
from cases import WRITABLE, Layout, contiguous, for_each, random_bits
from hypothesis import given
from hypothesis import strategies as st

import mixprec
from mixprec.ops import clip_coef, inv_scale, scale_from_amax_, underflow_share, update_scale_

FLT_MAX = 3.4028234663852886e38
EDGES = (0.0, -0.0, 2.0**-149, 2.0**-140, 2.0**-126, 1e-36, 2.0**-117, 2.0**-110, 1e-20, 0.1, 1.0)
EDGES += (1.0000001, 3.5, 447.99997, 448.0, 448.00003, 57344.0, 65504.0, 1e20, 3e38, FLT_MAX)
EDGES += (math.inf, math.nan, -1.0)


def run_scale_from_amax(
    amax: torch.Tensor, fmt: str, margin: int, power_of_two: bool, layout: Layout = contiguous
) -> None:
    scale, scale_inv = layout(torch.full(amax.shape, 0.625)), torch.full(amax.shape, math.nan)
    before, rule = ind.bits(amax), {"margin": margin, "power_of_two": power_of_two}
    scale_from_amax_(scale, scale_inv, amax, fmt, **rule)
    fmt_max, numbers = getattr(ind, fmt.upper()).max, ind.values(amax).ravel()
    want = [ind.scale_of(a, fmt_max, previous=0.625, **rule) for a in numbers]
    want32 = np.array(want, np.float32).reshape(tuple(amax.shape))
    ind.assert_bits(scale, want32.view(np.uint32), f"scale for {fmt}, margin {margin}")
    ind.assert_bits(scale_inv, (np.float32(1) / want32).view(np.uint32), "scale_inv")
    assert np.array_equal(ind.bits(amax), before)


@for_each("power_of_two", [True, False])
@for_each("margin", [0, 1, 3, -2, 64, -64])
@for_each("fmt", [s.name for s in ind.SPECS])
def test_scale_from_amax(backend: str, fmt: str, margin: int, power_of_two: bool) -> None:
    edges = torch.tensor(EDGES, dtype=torch.float32)
    amax = torch.cat([edges, random_bits(500, torch.float32)])
    run_scale_from_amax(amax, fmt, margin, power_of_two)


@for_each("layout", WRITABLE)
@for_each("shape", [(0,), (), (1,), (13,), (3, 5)])
def test_shapes_and_layouts(backend: str, shape: tuple[int, ...], layout: Layout) -> None:
    run_scale_from_amax(layout(torch.rand(shape) + 0.01), "e5m2", 0, True, layout)


# op, its formula in FP64, and arguments with the dtype of the first one.
Formula = Callable[..., float]
SCALARS: dict[str, tuple[Callable[..., torch.Tensor], Formula, torch.dtype, tuple]] = {
    "inv_scale": (inv_scale, lambda scale: np.float64(1) / scale, torch.float32, ((),)),
    "clip_coef": (
        clip_coef,
        lambda sum_sq, max_norm: np.minimum(1.0, max_norm / (np.sqrt(sum_sq) + 1e-6)),
        torch.float64,
        ((1e-6,), (0.7,), (1.0,), (1e6,)),
    ),
}


@for_each("name", SCALARS)
def test_scalars_are_rounded_once(backend: str, name: str) -> None:
    op, formula, dtype, settings = SCALARS[name]
    numbers = [*EDGES[:-1], 2.0**127, 65536.0, *ind.values(random_bits(200, torch.float32))]
    for number, others in itertools.product(numbers, settings):
        x = torch.tensor(number, dtype=torch.float32).abs().to(dtype)
        with np.errstate(all="ignore"):
            want = ind.narrow(np.array(formula(ind.values(x), *others)), torch.float32)
        for shape in ((), (1,)):
            got = op(x.view(shape), *others)
            ind.assert_bits(got.view(()), want, f"{name} of {number}, {others}")
            assert (got.dtype, got.shape) == (torch.float32, shape if op is inv_scale else ())


def test_clip_coef_of_several_sums(backend: str) -> None:
    for shape in ((0,), (3,), (2, 5), (1009,)):
        sums = torch.rand(shape, dtype=torch.float64) * 100
        want = min(1.0, 1.0 / (math.sqrt(sums.sum().item()) + 1e-6))
        assert clip_coef(sums, 1.0).item() == pytest.approx(want, rel=2e-7)


class Loss:
    """A loss scale's state and its update in Python integers and floats."""

    def __init__(self, scale: float, hysteresis: int) -> None:
        self.scale, self.growth, self.left = float(np.float32(scale)), 0, hysteresis
        self.counters = [0, 0, 0]

    def update(self, found: bool, share: float | None, settings: dict) -> None:
        s = settings
        skipped, applied, in_a_row = self.counters
        self.counters = [skipped + found, applied + (not found), in_a_row + 1 if found else 0]
        if found:
            self.growth, self.left = 0, max(self.left - 1, 0)
            if self.left == 0:
                lower = max(float(np.float32(self.scale * s["backoff_factor"])), s["min_scale"])
                self.scale = min(self.scale, lower)
            return
        self.growth += 1
        underflow = share is not None and share > s["grow_on_underflow"]
        if self.growth >= s["growth_interval"] / (20 if underflow else 1):
            with np.errstate(over="ignore"):
                higher = float(np.float32(self.scale * s["growth_factor"]))
            limit = math.inf if s["max_scale"] is None else s["max_scale"]
            higher = min(higher, limit)
            if math.isfinite(higher):
                self.scale = max(self.scale, higher)
            self.growth, self.left = 0, s["hysteresis"]


def device_state(scale: float, hysteresis: int) -> tuple[torch.Tensor, ...]:
    trackers = (torch.zeros(1, dtype=torch.int32), torch.tensor([hysteresis], dtype=torch.int32))
    return torch.tensor([scale]), *trackers, torch.zeros(3, dtype=torch.int64), torch.zeros(1)


@given(st.data())
def test_update_scale_against_plain_python(data: st.DataObject) -> None:
    settings = {
        "growth_factor": data.draw(st.sampled_from([2.0, 4.0, 1.5, 1.25])),
        "backoff_factor": data.draw(st.sampled_from([0.5, 0.25, 0.75])),
        "growth_interval": data.draw(st.sampled_from([1, 2, 3, 4, 40, 100])),
        "min_scale": data.draw(st.sampled_from([2.0**-24, 1.0, 128.0])),
        "max_scale": data.draw(st.sampled_from([None, 2.0**20, 1000.0])),
        "hysteresis": data.draw(st.integers(1, 3)),
        "grow_on_underflow": data.draw(st.sampled_from([0.0, 0.25, 1.0])),
    }
    start = data.draw(st.sampled_from([1.0, 2.0**16, 2.0**-23, 3.0, 2.0**126, FLT_MAX]))
    share = data.draw(st.sampled_from([None, 0.0, 0.25, 0.5]))
    underflow = None if share is None else torch.tensor(share)
    flags = [0.0, 0.0, 0.0, 1.0, 1.0, 2.0, math.inf, math.nan]  # any but 0 is a hit
    steps = data.draw(st.lists(st.sampled_from(flags), max_size=25))
    for backend in ("cpp", "reference"):
        scale, growth, left, counters, found_inf = device_state(start, settings["hysteresis"])
        want = Loss(start, settings["hysteresis"])
        for found in steps:
            found_inf.fill_(found)
            with mixprec.use_backend(backend):
                update_scale_(scale, growth, left, counters, found_inf, underflow, **settings)
            want.update(found != 0, share, settings)
            got = scale.item(), growth.item(), left.item()
            assert got == (want.scale, want.growth, want.left), backend
            assert counters.tolist() == want.counters


@for_each("factors", [(2.0, 0.5), (1.5, 0.75), (1.1, 0.9), (1.001, 0.3)])
@for_each("interval", [1, 2, 5])
@for_each("start", [65536.0, 2.0**127])
def test_update_scale_agrees_with_torch(
    backend: str, start: float, interval: int, factors: tuple[float, float]
) -> None:
    """Without limits and hysteresis it is torch.amp's update, bit for bit; it never reaches Inf."""
    rng = random.Random(interval)
    *state, found_inf = device_state(start, 1)
    torch_scale, torch_growth = state[0].clone(), state[1].clone()
    names = ("growth_factor", "backoff_factor", "growth_interval", "min_scale")
    settings = dict(zip(names, (*factors, interval, 0.0), strict=True))
    for step in range(300):
        found_inf.fill_(float(rng.random() < 0.2))
        update_scale_(*state, found_inf, **settings)
        torch._amp_update_scale_(torch_scale, torch_growth, found_inf, *factors, interval)
        got = state[0].item(), state[1].item()
        assert got == (torch_scale.item(), torch_growth.item()), step


def test_underflow_share() -> None:
    """Of 20 elements 8 are 0, and 3 of the other 12 subnormal."""
    counts = torch.tensor([[0, 0, 5, 1], [2, 1, 3, 2]])
    assert underflow_share(counts, 20).item() == 0.25
    assert underflow_share(torch.tensor([[0, 0, 7, 0]]), 7).item() == 1.0  # nothing is left
    assert underflow_share(torch.tensor([[0, 0, 6, 0]]), 7).item() == 0.0
    assert underflow_share(torch.zeros(0, 4).long(), 0).item() == 0.0
