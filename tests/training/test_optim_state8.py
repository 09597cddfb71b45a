"""Moments in 8 bits: which params have them, resuming, and conversion to other dtypes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from cases import normal
from optimizers import assert_same, clones, copies, tensors, through_a_file, train

from mixprec.optim import SGD, AdamW, Lion

LARGE = (65, 70)  # no multiple of a block
MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
KINDS = [
    pytest.param(AdamW, {}, id="AdamW"),
    pytest.param(SGD, {"momentum": 0.9}, id="SGD"),
    pytest.param(Lion, {}, id="Lion"),
]
MIXES: list[dict[str, Any]] = [
    {"master_weights": "remainder16"},
    {"master_weights": "fp32"},
    {"stochastic_rounding": True},
]
kinds = pytest.mark.parametrize(("kind", "settings"), KINDS)


def params() -> list[torch.nn.Parameter]:
    """Large and small ones, bf16, fp32 and fp64."""
    cases = [(LARGE, torch.bfloat16), ((8192,), torch.float32), ((4095,), torch.bfloat16),
             (LARGE, torch.float64)]  # fmt: skip
    return [torch.nn.Parameter(normal(s, d, seed=i)) for i, (s, d) in enumerate(cases)]


def make(kind: Any, settings: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    own = params()
    return kind(own, **{"lr": 0.01, "state_dtype": "int8", **settings, **options}), own


@kinds
def test_which_params_have_codes(kind: Any, settings: dict[str, Any]) -> None:
    """Those of 4,096 elements and more, except fp64; `state_dtype: int8` in the repr."""
    optimizer, own = make(kind, settings)
    train(optimizer, own, 1)
    for p in own:
        for name in MOMENTS & optimizer.state[p].keys():
            moment, scale = optimizer.state[p][name], optimizer.state[p].get(f"{name}_scale")
            if p.numel() < 4096 or p.dtype == torch.float64:
                assert scale is None
                assert moment.dtype == torch.promote_types(p.dtype, torch.float32)
            else:
                assert (moment.dtype, moment.shape) == (torch.uint8, p.shape)
                assert (scale.dtype, len(scale)) == (torch.float32, math.ceil(p.numel() / 256))
    assert "state_dtype: int8\n" in repr(optimizer)


@kinds
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_resumed_run_is_the_uninterrupted_run(
    kind: Any, settings: dict[str, Any], mix: dict[str, Any]
) -> None:
    """Also through FP32 and BF16: codes decode without loss and are found again."""
    optimizer, own = make(kind, settings, **mix)
    train(optimizer, own, 3)
    weights = clones(own)
    wide = through_a_file(optimizer.fp32_state_dict())
    assert not any(t.dtype == torch.uint8 for s in wide["state"].values() for t in s.values())
    narrow = copy.deepcopy(wide)
    for state in narrow["state"].values():
        for name in MOMENTS & state.keys():
            if state[name].numel() >= 4096 and state[name].dtype == torch.float32:
                state[name] = state[name].bfloat16()
    saved = [through_a_file(optimizer.state_dict()), wide, narrow]
    train(optimizer, own, 2, 3)
    for state in saved:
        other, mine = make(kind, settings, **mix)
        with torch.no_grad():
            for p, w in zip(mine, weights, strict=True):
                p.copy_(w)
        other.load_state_dict(state)
        train(other, mine, 2, 3)
        assert_same(tensors(other, mine), tensors(optimizer, own))


@kinds
def test_another_state_dtype_takes_the_values(kind: Any, settings: dict[str, Any]) -> None:
    optimizer, own = make(kind, settings)
    train(optimizer, own, 2)
    wide, state = optimizer.fp32_state_dict()["state"], optimizer.state_dict()
    state["state"] = {0: state["state"][0]}
    for dtype in (torch.float32, torch.bfloat16):
        other, mine = make(kind, settings, state_dtype=dtype)
        other.load_state_dict(state)
        for name in MOMENTS & other.state[mine[0]].keys():
            got = other.state[mine[0]][name]
            assert got.dtype == dtype
            assert torch.equal(got.float(), wide[0][name])


def test_it_trains_as_fp32_moments_do() -> None:
    """A linear regression: the loss after 200 steps is within a few percent."""
    x, target = normal((256, 64), torch.float32, 1), normal((64, 64), torch.float32, 2)
    losses = []
    for dtype in (torch.float32, "int8"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = AdamW([weight], lr=0.02, weight_decay=0.0, state_dtype=dtype)
        for step in range(200):
            batch = slice(step % 8 * 32, step % 8 * 32 + 32)
            loss = (x[batch] @ (weight - target)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((x @ (weight - target)).square().mean().item())
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_a_skipped_step_changes_no_code() -> None:
    optimizer, own = make(AdamW, {})
    train(optimizer, own, 2)
    before = copies(optimizer, own)
    for p in own:
        p.grad = torch.ones_like(p)
    own[0].grad.view(-1)[-1] = math.inf
    optimizer.step()
    assert optimizer.last_step_skipped
    assert_same(tensors(optimizer, own), before)


def test_states_that_do_not_fit_are_refused() -> None:
    optimizer, own = make(AdamW, {})
    train(optimizer, own, 2)
    good, before = optimizer.state_dict(), copies(optimizer, own)
    scale = good["state"][0]["exp_avg_scale"]
    for changes, message in (
        (
            {"exp_avg_scale": scale.repeat(2)},
            r"exp_avg_scale must be .* one per 256 elements.*\(36,\)",
        ),
        ({"exp_avg_scale": scale.half()}, "exp_avg_scale must be float32.*got float16"),
        ({"exp_avg_scale": None}, "exp_avg_scale must be float32.*got None"),
        ({"exp_avg": torch.zeros(3, dtype=torch.uint8)}, "exp_avg must be a tensor of shape"),
    ):
        bad = {**good, "state": {**good["state"], 0: {**good["state"][0], **changes}}}
        with pytest.raises(ValueError, match=f"^AdamW.load_state_dict: {message}"):
            optimizer.load_state_dict(bad)
        assert_same(tensors(optimizer, own), before)
