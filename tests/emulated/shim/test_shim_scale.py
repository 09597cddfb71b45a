"""The kernels of csrc/cuda on a few scalars (scales, clipping), on the CPU, bit for bit."""

from __future__ import annotations

import random

import independent as ind
import pytest
import torch
from cases import FP8, name, normal, random_bits
from emulated.ops import reference
from emulated.shim import runner
from emulated.shim.helpers import assert_lists

AMAXES = (0.0, 1e-45, 2.0**-126, 1e-3, 1.0, 3.0, 448.0, 3e38, float("inf"), float("nan"))


@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.bfloat16], ids=name)
def test_scale_from_amax(dtype: torch.dtype) -> None:
    some = torch.tensor(AMAXES)
    for amax in (some, some[:0], normal((1000,), torch.float32).abs()):
        for margin, power_of_two in ((0, True), (3, False), (-64, True), (64, False)):
            got, want = [(torch.full_like(amax, 5.0), torch.zeros_like(amax)) for _ in range(2)]
            runner.scale_from_amax_(*got, amax, dtype, margin, power_of_two)
            reference("scale_from_amax_")(*want, amax, dtype, margin, power_of_two)
            assert_lists(list(got), list(want), f"scale, scale_inv at margin {margin}")


def test_inv_scale() -> None:
    for scale in (*random_bits(200, torch.float32), torch.tensor([65536.0]), torch.tensor(0.0)):
        ind.assert_same_bits(runner.inv_scale(scale), reference("inv_scale")(scale), f"1 / {scale}")


def test_clip_coef() -> None:
    for count in (0, 1, 3, 255, 256, 257, 5000):
        sum_sq = (torch.arange(count) % 37 * 3).double()  # whole numbers: the order is no matter
        for max_norm in (1e-30, 0.1, 1.0, 77.7, 1e30, float("inf")):
            want = reference("clip_coef")(sum_sq, max_norm)
            ind.assert_same_bits(runner.clip_coef(sum_sq, max_norm), want, f"of {count}")
    for bad in (float("inf"), float("nan"), -1.0):
        sum_sq = torch.tensor([1.0, bad], dtype=torch.float64)
        ind.assert_same_bits(
            runner.clip_coef(sum_sq, 1.0), reference("clip_coef")(sum_sq, 1.0), "bad"
        )


def test_clip_coef_adds_in_one_order() -> None:
    sum_sq = normal((3001,), torch.float64).square()
    results = []
    for seed in range(4):
        runner.seed(seed)
        results.append(runner.clip_coef(sum_sq, 1.0).item())
    assert len(set(results)) == 1
    assert abs(results[0] / reference("clip_coef")(sum_sq, 1.0).item() - 1) <= 2.0**-23


@pytest.mark.parametrize("start", [2.0**-24, 1.0, 65536.0, 2.0**127, 0.3])
def test_update_scale(start: float) -> None:
    rng = random.Random(start)
    for rule in (
        (2.0, 0.5, 3, 2.0**-24, float("inf"), 1, 1.0),
        (1.7, 0.3, 40, 0.0, 1e5, 2, 0.1),
        (1.0, 1.0, 1, 4.0, 2.0, 3, 0.0),
    ):
        state = [torch.tensor(start), *(torch.tensor(n, dtype=torch.int32) for n in (2, rule[5]))]
        state.append(torch.tensor([5, 1 << 40, 2]))
        want = [t.clone() for t in state]
        for _ in range(60):
            found = torch.tensor(rng.choice((0.0, 0.0, 0.0, 1.0, 2.0, float("nan"))))
            underflow = rng.choice((None, torch.tensor(0.1), torch.tensor([0.5])))
            runner.update_scale_(*state, found, underflow, *rule)
            reference("update_scale_")(*want, found, underflow, *rule)
            ind.assert_same_bits(state[0], want[0], "scale")
            assert [t.tolist() for t in state[1:]] == [t.tolist() for t in want[1:]]
