"""Clipped gradients and their norms: of all groups, of one, of each element."""

from __future__ import annotations

import math

import pytest
import torch
from cases import name
from optimizers import Kind, Run, assert_same, clones, kinds, parameters, set_grads

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import AdamW


@kinds
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 2.0**9), (torch.bfloat16, 2.0**9), (torch.float64, 1.0)],
    ids=name,
)
def test_max_grad_value(kind: Kind, dtype: torch.dtype, scale: float) -> None:
    run, expected = Run(kind, dtype, lr=0.01, max_grad_value=0.5), Run(kind, dtype, lr=0.01)
    scaler = GradScaler(init_scale=scale, enabled=scale != 1.0)
    for step in range(3):
        scaler.scale(torch.zeros(()))
        set_grads(run.params, step, scale)
        set_grads(expected.params, step)
        torch.nn.utils.clip_grad_value_(expected.params, 0.5)
        assert expected.params[3].grad.abs().max() == 0.5
        expected.optimizer.step()
        scaler.step(run.optimizer)
        scaler.update()
    assert_same(run, expected)


@kinds
def test_each_group_may_have_its_own_limit(kind: Kind) -> None:
    """A group with a max_grad_norm is clipped by its own norm, the others by theirs together: the
    matrices of Muon and its other params, too.

    After unscaling, where a scaler drives the step; and the gradients stay as they are.
    """
    params = parameters(shapes=[(3, 5), (0,), (), (129,), (7,), (2, 3, 5)])
    other = clones(params)
    groups = ((0, 1, 0.01), (1, 4, 0.02), (4, 5, 0.1), (5, 6, 0.01))
    optimizer, expected = (
        kind([{"params": ps[first:end], "lr": lr} for first, end, lr in groups])
        for ps in (params, other)
    )
    optimizer.max_grad_norm = 0.5
    optimizer.param_groups[1]["max_grad_norm"] = 0.25
    optimizer.param_groups[3]["max_grad_norm"] = 1e4
    assert optimizer.grad_norm is None
    for step in range(4):
        scaler = GradScaler(init_scale=2.0**9, enabled=step % 2 == 1)
        scaler.scale(torch.zeros(()))
        set_grads(params, step, 2.0**9 if step % 2 else 1.0)
        grads = [p.grad.clone() for p in params]
        set_grads(other, step)
        norms = [
            torch.nn.utils.get_total_norm([p.grad.double() for p in g["params"]]).item()
            for g in expected.param_groups
        ]
        torch.nn.utils.clip_grad_norm_(other[1:4], 0.25)
        torch.nn.utils.clip_grad_norm_([other[0], other[4]], 0.5)
        scaler.step(optimizer)
        expected.step()
        assert_same([p.grad for p in params], grads)
        found = optimizer.group_grad_norms
        assert all(norm.dtype == torch.float64 for norm in found)
        assert [norm.item() for norm in found] == pytest.approx(norms, rel=1e-12)
        assert optimizer.grad_norm.item() == pytest.approx(math.hypot(*norms), rel=1e-12)
    for p, o in zip(params, other, strict=True):
        got, want = (dict(state) for state in (optimizer.state[p], expected.state[o]))
        torch.testing.assert_close((p, got), (o, want), rtol=1e-5, atol=1e-7)


def test_norms_are_unscaled_and_of_the_last_step_only() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW([{"params": params[a : a + 2]} for a in (0, 2, 4)])
    scaler = GradScaler(init_scale=2.0**7)
    scaler.scale(torch.zeros(()))
    set_grads(params, 0, 2.0**7)
    for p in params[2:4]:
        p.grad = None
    want = math.sqrt(sum((p.grad.double() / 2**7).square().sum() for p in params[4:]))
    scaler.step(optimizer)
    assert optimizer.group_grad_norms[1] is None
    assert optimizer.group_grad_norms[2].item() == pytest.approx(want, rel=1e-12)
    optimizer.zero_grad()
    set_grads(params[2:4], 1)
    optimizer.step()
    assert [n is None for n in optimizer.group_grad_norms] == [True, False, True]
    # after unscale_, with nothing to clip, gradients are not read again
    scaler.update()
    set_grads(params, 2, 2.0**7)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.grad_norm is None
    # nor at all with fp32 params, no scaler and nothing to clip
    plain = Run(AdamW).train().optimizer
    empty = Run(AdamW, parameters(shapes=[(0,)]), max_grad_norm=1.0).train().optimizer
    assert empty.grad_norm.item() == 0
    assert plain.grad_norm is None
    assert plain.group_grad_norms == [None]
