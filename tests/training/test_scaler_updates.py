"""What GradScaler.update does besides torch's: counts, skips in a row, early growth, limits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from optimizers import through_a_file
from scalers import (
    INF,
    NAN,
    OURS,
    TORCHS,
    Make,
    Optimizer,
    every_optimizer,
    every_way,
    filled,
    iterate,
    our_adamw,
    our_clipping_adamw,
    our_sgd,
    param,
    step,
    torch_plain,
    with_optimizers,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.grad_report import Overflow


@every_way
@every_optimizer
def test_counters(make: Make, explicit: bool) -> None:
    optimizer, scaler = make([param(4)]), GradScaler()
    assert not scaler.last_step_skipped
    seen, read = [(0, 0)], [(scaler.skipped, scaler.applied_steps)]
    for i, bad in enumerate(([], [INF], [NAN], [], [INF], [])):
        iterate(scaler, optimizer, *bad, explicit=explicit)
        seen.append((seen[-1][0] + len(bad), seen[-1][1] + (not bad)))
        read.append((scaler.skipped, scaler.applied_steps))
        assert scaler.last_step_skipped == bool(bad)
        assert scaler.state_dict()["skipped_in_a_row"] == (2 if i == 2 else len(bad))
    assert [(a.item(), b.item()) for a, b in read] == seen  # later steps do not write on them
    assert {(t.dtype, t.dim()) for pair in read for t in pair} == {(torch.int64, 0)}
    counts = scaler.state_dict()
    optimizer.param_groups[0]["params"][0].grad = filled((4,), INF)
    scaler.step(optimizer)
    scaler.update(2.0**16)  # a scale set by hand: not an update that says how the step went
    assert scaler.state_dict() | {"scale": 0} == counts | {"scale": 0}
    if make in OURS:
        assert optimizer.skipped.item() == 4


@every_optimizer
def test_the_callback_after_many_skips_gets_the_report_and_may_raise(make: Make) -> None:
    callback = Mock(side_effect=[None] * 3 + [TimeoutError])
    optimizer = make([("weight", param(4))])
    scaler = GradScaler(max_consecutive_skips=2, on_max_skips=callback)
    for bad in ([INF], [NAN], [], [INF], [INF, NAN], [INF], [INF], [INF], [], [NAN]):
        iterate(scaler, optimizer, *bad)
    with pytest.raises(TimeoutError):
        iterate(scaler, optimizer, NAN)
    iterate(scaler, optimizer)  # the iteration was ended properly
    assert not scaler.last_step_skipped
    found = [(0, 1), (1, 1), (1, 0), (0, 1)]  # Inf and NaN
    assert callback.call_args_list == [call([Overflow("weight", 4, *counts)]) for counts in found]


COPIES: dict[str, Callable[[GradScaler], GradScaler]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "state_dict": lambda scaler: loaded(scaler.state_dict()),
}
SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**8,
    "growth_interval": 40,
    "hysteresis": 2,
    "max_scale": 2.0**12,
    "max_consecutive_skips": 3,
    "grow_on_underflow": 0.0,
}


def loaded(state: dict) -> GradScaler:
    scaler = GradScaler(max_consecutive_skips=3, grow_on_underflow=0.0)
    scaler.load_state_dict(through_a_file(state))
    return scaler


@with_optimizers(*TORCHS, *OURS, our_clipping_adamw)
@pytest.mark.parametrize("way", COPIES)
def test_a_copied_scaler_goes_on_as_the_original(way: str, make: Make) -> None:
    """Copied before any step: scale, trackers and counts, and when, and what, it raises."""

    def run(copied_before: int) -> list[Any]:
        seen: list[Any] = []
        optimizer, scaler = make([param(4)]), GradScaler(**SETTINGS)
        for i in range(16):
            if i == copied_before:
                scaler = COPIES[way](scaler)
            try:
                iterate(scaler, optimizer, NAN if i % 9 < 7 else 1e-39, explicit=i % 2 == 0)
            except RuntimeError as error:
                seen.append((i, str(error)))
            seen.append((scaler.state_dict(), scaler.last_step_skipped))
        seen.append(scaler.overflow_report())
        return seen

    expected = run(-1)
    assert [each[0] for each in expected if isinstance(each[-1], str)] == [2, 5, 11, 14]
    assert len({each[0]["scale"] for each in expected if isinstance(each[0], dict)}) > 5
    for before in range(13):
        assert run(before) == expected, before


@every_optimizer
def test_early_growth(make: Make) -> None:
    """After a twentieth of the interval, here 3 updates, if half of what is not zero is subnormal.

    (tests/ops/test_reference_values.py has all of the rule.)
    """
    dtype = torch.float16 if make in OURS else torch.float32
    tiny = torch.finfo(dtype).smallest_normal / 4
    for threshold, interval, factor in (
        (0.25, 60, 2.0),
        (0.5, 60, 1.0),  # not more than that
        (None, 60, 1.0),
        (0.25, None, 1.0),  # a static scale
    ):
        optimizer, seen = make([param(8, dtype=dtype)]), []
        scaler = GradScaler(init_scale=1.0, growth_interval=interval, grow_on_underflow=threshold)
        for _ in range(7):
            iterate(scaler, optimizer, 0.0, 0.0, 0.0, 0.0, tiny, -tiny)
            seen.append(scaler.get_scale())
        assert seen == [1, 1, factor, factor, factor, factor**2, factor**2], threshold


def test_early_growth_looks_at_the_worst_optimizer() -> None:
    a, b = param(4, dtype=torch.float16), param(4000, dtype=torch.float16)
    optimizers = [our_adamw([a]), our_sgd([b])]
    scaler = GradScaler(init_scale=1.0, growth_interval=20, grow_on_underflow=0.5)
    for _ in range(3):
        scaler.scale(torch.zeros(()))
        a.grad, b.grad = torch.full_like(a, 1e-7), torch.ones_like(b)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    step(scaler, optimizers[1])  # the other one, of long ago, does not count
    assert scaler.get_scale() == 8.0


def scales_after(scaler: GradScaler, optimizer: Optimizer, bad: str) -> list[float]:
    """The scale after each step; "x" is one that overflows, and changes nothing."""
    (p,) = optimizer.param_groups[0]["params"]
    seen = []
    for letter in bad:
        before = p.detach().clone()
        iterate(scaler, optimizer, *([INF] if letter == "x" else []))
        assert torch.equal(p, before) == (letter == "x")
        seen.append(scaler.get_scale())
    return seen


@every_optimizer
def test_hysteresis_and_limits(make: Make) -> None:
    """Megatron-LM's rule; update_scale_reference_ has it in Python, for any state.

    An overflow takes one from the hysteresis, and backs off once that is used up; growth, after an
    interval without, fills it again.
    """
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    settings |= {"hysteresis": 2, "min_scale": 1.0, "max_scale": 64.0}
    scaler, optimizer = GradScaler(init_scale=8.0, **settings), make([param(4)])
    assert scales_after(scaler, optimizer, "xxx..x..") == [8, 2, 1, 1, 4, 4, 4, 16]
    assert scales_after(scaler, optimizer, "xx......xx") == [16, 4, 4, 16, 16, 64, 64, 64, 64, 16]
    assert (scaler.skipped.item(), scaler.applied_steps.item()) == (8, 10)


@every_optimizer
def test_a_static_scale_stays_and_skips(make: Make) -> None:
    """Static and dynamic can be exchanged: growth catches up with an interval that is lowered."""
    scaler = GradScaler(init_scale=128.0, growth_interval=None, min_scale=256.0, hysteresis=2)
    optimizer = make([param(4)])
    assert scales_after(scaler, optimizer, ".xxx..") == [128.0] * 6
    assert [scaler.skipped.item(), scaler.applied_steps.item()] == [3, 3]
    scaler.update(64)
    assert scaler.get_scale() == 64.0
    scaler = GradScaler(init_scale=128.0, growth_interval=None)
    for interval, bad, expected in (
        (2, "..x.", [128, 256, 128, 128]),
        (100, "...", [128] * 3),
        (3, ".", [256]),
        (None, "..x.", [256] * 4),
    ):
        scaler.set_growth_interval(interval)
        assert scales_after(scaler, optimizer, bad) == expected


def test_static_scales_between_torch_and_ours() -> None:
    optimizer = torch_plain([param(4)])
    static = GradScaler(init_scale=128.0, growth_interval=None)
    scales_after(static, optimizer, "...")
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(static.state_dict())
    assert scales_after(theirs, optimizer, "....") == [128] * 4  # torch's way to be static
    for mine, state, expected in (
        (GradScaler(growth_interval=1), static, [128, 128, 128]),
        (static, torch.amp.GradScaler("cpu", 32.0, growth_interval=1), [32, 32, 32]),
        (static, GradScaler(init_scale=32.0, growth_interval=1), [64, 128, 64]),
    ):
        mine.load_state_dict(state.state_dict())
        assert scales_after(mine, optimizer, "..x") == expected
