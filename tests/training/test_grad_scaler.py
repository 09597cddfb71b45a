"""GradScaler: torch.amp.GradScaler's contract, settings and state, and where ours is stricter."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from optimizers import through_a_file
from scalers import Make, every_optimizer, filled, iterate, our_adamw, param

from mixprec.amp.grad_scaler import GradScaler

BAD_SETTINGS = (
    *({"init_scale": x} for x in (0.0, -1.0, math.inf, math.nan, 1e39, "big", None)),
    *({"growth_factor": x} for x in (1.0, 0.5, math.inf, math.nan)),
    *({"backoff_factor": x} for x in (0.0, 1.0, -0.5, 2.0, math.nan)),
    *({"growth_interval": x} for x in (0, -1, 2.5, 2**31)),
    *({"min_scale": x} for x in (0.0, -1.0, math.nan, math.inf)),
    *({"max_scale": x} for x in (0.0, math.nan, math.inf)),
    {"min_scale": 2.0, "max_scale": 1.0},
    *({"hysteresis": x} for x in (0, -1, 1.5)),
    *({"max_consecutive_skips": x} for x in (0, -1, 2.5, "3")),
    *({"grow_on_underflow": x} for x in (-0.1, 1.1, math.nan, "much")),
)


def test_settings_out_of_range() -> None:
    """In the constructor and in the setters, which change nothing then."""
    scaler = GradScaler()
    for settings in BAD_SETTINGS:
        (*_, setting) = settings
        with pytest.raises(ValueError, match=f"GradScaler: {setting} must be"):
            GradScaler(**settings)
        GradScaler(**settings, enabled=False)  # not checked
        if setter := getattr(scaler, f"set_{setting}", None):
            with pytest.raises(ValueError, match=f"GradScaler: {setting} must be"):
                setter(settings[setting])
    assert scaler.state_dict() == GradScaler().state_dict()
    good = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    for setting, value in good.items():
        getattr(scaler, f"set_{setting}")(value)
    assert scaler.state_dict().items() >= good.items()


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_never_disables_itself(device: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = GradScaler(device)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**16
    assert scaler.scale(torch.ones(())).item() == 2.0**16
    assert scaler._scale.device.type == scaler._growth_tracker.device.type == "cpu"
    scaler.update(torch.tensor(4.0))  # torch compares its device type with the scaler's
    assert scaler.get_scale() == 4.0


@every_optimizer
def test_disabled_passes_everything_through(make: Make) -> None:
    p, q = param(4), param(4)
    optimizer, expected, scaler = make([p]), make([q]), GradScaler(enabled=False)
    nested = [p, (p,)]
    assert scaler.scale(p) is p
    assert scaler.scale(nested) is nested
    p.grad, q.grad = filled((4,)), filled((4,))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected.step()
    scaler.update()
    scaler.load_state_dict({})
    assert torch.equal(p, q)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert scaler.skipped.item() == scaler.applied_steps.item() == 0
    assert scaler.overflow_report() == scaler.underflow_report() == []
    assert scaler.last_step_skipped is False
    assert scaler.step(optimizer, lambda: 3.0) == 3.0  # closures too
    assert copy.deepcopy(scaler).state_dict() == {}


def test_scale_nested() -> None:
    scaler = GradScaler(init_scale=8.0)
    a, b, c = torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.tensor(4.0, dtype=torch.float64)
    scaled = "[tensor(8.), (tensor([16., 24.]), [tensor(32., dtype=torch.float64)])]"
    assert str(scaler.scale([a, (b, [c])])) == scaled
    lazy = scaler.scale(x for x in (a, b))
    assert [x.sum().item() for x in lazy] == [8.0, 40.0]
    for wrong in (3.0, [a, None], "loss"):
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale(wrong)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scaling_an_fp16_loss_does_not_overflow(shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 3.0, dtype=torch.float16, requires_grad=True)
    scaler = GradScaler(init_scale=2.0**15)
    scaled = scaler.scale(loss)
    assert scaled.dtype == torch.float32
    assert scaled.item() == 3.0 * 2.0**15 > torch.finfo(torch.float16).max
    scaled.sum().backward()
    assert loss.grad.dtype == torch.float16
    assert loss.grad.item() == 2.0**15
    assert scaler.scale(torch.ones(2, dtype=torch.float16)).dtype == torch.float16  # as torch


def test_update_with_a_new_scale() -> None:
    scaler = GradScaler()
    for bad in (0, -1.0, math.inf, math.nan, "4"):
        with pytest.raises(ValueError, match="new_scale must be positive"):
            scaler.update(bad)
    assert scaler.get_scale() == 2.0**16


def test_state_dict_round_trip_and_torch_both_ways() -> None:
    optimizer = our_adamw([param(4)])
    scaler = GradScaler(init_scale=64.0, growth_interval=4, hysteresis=2, max_scale=2.0**20)
    for letter in "x..x....xx.":
        iterate(scaler, optimizer, *([math.inf] if letter == "x" else []))
    state = scaler.state_dict()
    loaded = through_a_file(state)
    assert loaded == state
    assert state["_hysteresis_tracker"] == 0
    assert (state["skipped"], state["applied_steps"], state["skipped_in_a_row"]) == (4, 7, 0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(loaded)
    torch_state = theirs.state_dict()
    assert torch_state == {key: state[key] for key in torch_state}
    for used in (False, True):
        other, mine = GradScaler(), GradScaler(min_scale=0.5, hysteresis=3)
        for each in (other, mine) if used else ():
            iterate(each, optimizer, math.inf)
        other.load_state_dict(loaded)
        assert other.state_dict() == state
        other.scale(torch.zeros(()))
        assert other.state_dict() == state
        assert other._scale.dtype == torch.float32
        mine.load_state_dict(torch_state)
        settings = {"min_scale": 0.5, "max_scale": None, "hysteresis": 3, "static": False}
        counts = {"skipped": 0, "applied_steps": 0, "skipped_in_a_row": 0, "version": 1}
        assert mine.state_dict() == torch_state | settings | counts | {"_hysteresis_tracker": 3}


DAMAGED = (
    *(settings for settings in BAD_SETTINGS if settings.keys() <= GradScaler().state_dict().keys()),
    *({"scale": x} for x in (0.0, math.inf, math.nan, -2.0, None)),
    {"_growth_tracker": -1},
    {"_growth_tracker": 1.5},
    {"_hysteresis_tracker": -1},
    *({key: x} for key in ("skipped", "applied_steps", "skipped_in_a_row") for x in (-1, 0.5)),
    {"static": "yes"},
    {"version": 2},
)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    scaler = GradScaler(init_scale=32.0)
    scaler.scale(torch.zeros(()))
    before = scaler.state_dict()
    for damage in DAMAGED:
        (*_, entry) = damage
        with pytest.raises(ValueError, match=f"GradScaler: {entry} must be"):
            scaler.load_state_dict(GradScaler().state_dict() | damage)
        assert scaler.state_dict() == before
    partial = GradScaler().state_dict()
    del partial["growth_interval"]
    with pytest.raises(ValueError, match="lacks"):
        scaler.load_state_dict(partial)
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == before


def test_repr_tells_scale_counts_and_settings() -> None:
    scaler, rest = GradScaler(), "growth_interval=2000, min_scale=2^-24)"
    assert repr(scaler) == f"GradScaler(scale=2^16, applied_steps=0, skipped=0, {rest}"
    optimizer = our_adamw([param(4)])
    for bad in ((), (), (math.inf,)):
        iterate(scaler, optimizer, *bad)
    assert repr(scaler) == f"GradScaler(scale=2^15, applied_steps=2, skipped=1, {rest}"
    assert "    skipped steps: 1\n" in repr(optimizer)
    static = GradScaler(init_scale=1000.0, growth_interval=None, max_scale=4096.0)
    assert "scale=1000, " in repr(static)
    assert repr(static).endswith("growth_interval=None, min_scale=2^-24, max_scale=2^12)")
    assert repr(GradScaler(enabled=False)) == "GradScaler(enabled=False)"
