"""Examples of the ops on scales."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .inputs import Arguments, random, tensor


def scale_from_amax(device: str) -> Iterator[Arguments]:
    amaxes = tensor(device, [0.0, 1e-40, 1.0, 3.0, 448.0, math.inf, math.nan])
    for amax in (amaxes, amaxes.repeat(16), amaxes[3]):
        for power_of_two in (True, False):
            scale, scale_inv = torch.full_like(amax, 2.0), torch.full_like(amax, 0.5)
            yield [scale, scale_inv, amax, torch.float8_e4m3fn, 0, power_of_two]


def inv_scale(device: str) -> Iterator[Arguments]:
    yield [tensor(device, 3.0)]


def clip_coef(device: str) -> Iterator[Arguments]:
    yield [tensor(device, 7.0, torch.float64), 1.0]
    yield [tensor(device, [4.0, 0.25, 16.0], torch.float64), 1.0]


def update_scale(device: str) -> Iterator[Arguments]:
    for found_inf in (0.0, 1.0):
        for interval, hysteresis, underflow in ((20, 2, tensor(device, 0.5)), (20, 1, None)):
            trackers = tensor(device, 1, torch.int32), tensor(device, 1, torch.int32)
            counters = tensor(device, [4, 5, 2], torch.int64)
            state = tensor(device, 2.0**16), *trackers, counters, tensor(device, found_inf)
            limits = interval, 2.0**-24, math.inf, hysteresis, 0.25
            yield [*state, underflow, 2.0, 0.5, *limits]


def update_delayed_scales(device: str) -> Iterator[Arguments]:
    amaxes = (-1.0, 0.0, 3.0, math.inf, math.nan)  # not used, zero, plain, not recorded
    for most_recent in (False, True):
        histories = [random(device, seed, (4,)).abs() for seed in range(len(amaxes))]
        scales = [tensor(device, 2.0) for _ in amaxes]
        staged = [tensor(device, amax) for amax in amaxes]
        yield [histories, scales, staged, [448.0, 57344.0] * 2 + [448.0], 1, True, most_recent]
