"""The public functions of a few scalars: scales, the clip factor, the loss scale's update."""

from __future__ import annotations

import random

import independent as ind
import torch
from cases import for_each

from mixprec.ops import clip_coef, inv_scale, scale_from_amax_, underflow_share, update_scale_


def test_numbers(backend: str) -> None:
    """448 / 3 / 4 = 37.33, and the largest power of two in it."""
    scale, inverse = torch.tensor([1.0]), torch.tensor([1.0])
    for power_of_two, want in ((True, 32.0), (False, 448 / 3 / 4)):
        rule = {"margin": 2, "power_of_two": power_of_two}
        scale_from_amax_(scale, inverse, torch.tensor([3.0]), "e4m3", **rule)
        ind.assert_same_bits(scale, torch.tensor([want]))
        ind.assert_same_bits(inverse, inv_scale(scale))
    factor = clip_coef(torch.tensor([9.0, 16.0]).double(), 1.0)
    ind.assert_same_bits(factor, torch.tensor(1 / (5 + 1e-6)))
    assert clip_coef(torch.tensor(9.0).double(), 4.0).item() == 1.0
    state = (torch.tensor([8.0]), *(torch.ones(1).int() for _ in range(2)), torch.zeros(3).long())
    limits = {"growth_interval": 1, "min_scale": 6.0, "max_scale": 12.0}
    for found_inf, want in ((0.0, 12.0), (1.0, 6.0), (1.0, 6.0)):
        update_scale_(*state, torch.tensor(found_inf), **limits)
        assert state[0].item() == want
    assert state[3].tolist() == [2, 1, 2]


def device_state(scale: float, hysteresis: int) -> tuple[torch.Tensor, ...]:
    trackers = (torch.zeros(1, dtype=torch.int32), torch.tensor([hysteresis], dtype=torch.int32))
    return torch.tensor([scale]), *trackers, torch.zeros(3, dtype=torch.int64), torch.zeros(1)


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
