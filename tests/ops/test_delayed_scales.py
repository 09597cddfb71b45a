"""update_delayed_scales_: amax histories and the scales that follow, against plain Python."""

from __future__ import annotations

import math
import random

import independent as ind
import numpy as np
import pytest
import torch
from cases import every_second, offset

from mixprec.ops.delayed_scales import UNUSED, update_delayed_scales_

LIMITS = (448.0, 448.0, 57344.0)
AMAXES = (0.0, 2.0**-149, 1e-30, 0.3, 1.0, 447.0, 1e4, 3e38, math.inf, math.nan, UNUSED)


def tensors(rng: random.Random, n: int, length: int) -> tuple[list[torch.Tensor], ...]:
    def draw(*shape: int, low: bool = False) -> torch.Tensor:
        numbers = [rng.choice(AMAXES[: 8 if low else 11]) for _ in range(math.prod(shape))]
        return torch.tensor(numbers, dtype=torch.float32).view(shape)

    histories = [draw(length, low=True) for _ in range(n)]
    scales = [torch.tensor(rng.choice([0.0, 0.5, 3.0])) for _ in range(n)]
    return histories, scales, [draw() for _ in range(n)]


def expected(
    history: list[float], scale: float, amax: float, limit: float, margin: int, **rule: bool
) -> tuple[list[float], float]:
    """One tensor's update, as numerics.md 4 says it in words."""
    if amax == UNUSED or not math.isfinite(amax):
        return history, scale
    history = [amax, *history][: len(history)]
    largest = amax if rule["most_recent"] else max(history)
    two = rule["power_of_two"]
    return history, ind.scale_of(largest, limit, margin=margin, power_of_two=two, previous=scale)


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("n", "length", "margin"), [(0, 1, 0), (1, 1, 0), (3, 5, 2), (40, 16, -1)])
def test_against_plain_numbers(
    backend: str, n: int, length: int, margin: int, power_of_two: bool, most_recent: bool
) -> None:
    rule, limits = {"power_of_two": power_of_two, "most_recent": most_recent}, LIMITS * n
    for layout in (torch.clone, every_second, offset):
        lists = tensors(random.Random(n), n, length)
        histories, scales, amaxes = ([layout(t) for t in tensors] for tensors in lists)
        want = [
            expected(h.tolist(), s.item(), a.item(), limit, margin, **rule)
            for h, s, a, limit in zip(*lists, limits, strict=False)
        ]
        update_delayed_scales_(histories, scales, amaxes, limits[:n], margin=margin, **rule)
        assert [h.tolist() for h in histories] == [h for h, _ in want]
        for scale, (_, number) in zip(scales, want, strict=True):
            ind.assert_bits(scale, np.array(number, np.float32).view(np.uint32))
        assert [a.item() for a in amaxes] == [UNUSED] * n
