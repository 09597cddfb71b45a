"""Steps of the optimizers that are skipped, with and without a scaler, and clipped gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import GRADS, name
from optimizers import (
    KINDS,
    LOW,
    MIXES,
    Kind,
    all_dtypes,
    assert_same,
    copies,
    forbid_synchronization,
    kinds,
    parameters,
    set_grads,
    tensors,
    train,
    trained,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import AdamW


@kinds
def test_without_a_scaler(kind: Kind) -> None:
    """Clipping, or a 16-bit param, makes a step skip; otherwise a NaN arrives, as in torch."""
    cases = [(d, None, 1.0, True) for d in GRADS]
    cases += [(d, masters, None, True) for d in LOW for masters in (None, "auto")]
    cases += [(d, None, None, False) for d in (torch.float32, torch.float64)]
    for i, (dtype, masters, max_norm, skips) in enumerate(cases):
        options = {"master_weights": masters, "max_grad_norm": max_norm}
        optimizer, params = trained(kind, dtype, **options)
        before = copies(optimizer, params)
        set_grads(params, 7)
        params[3].grad[-1] = (math.inf, math.nan, -math.inf)[i % 3]
        optimizer.step()
        assert optimizer.skipped.item() == skips
        if skips:
            assert_same(tensors(optimizer, params), before)
        else:
            arrived = (params[3], *optimizer.state[params[3]].values())  # Lion's: in its moment
            assert not all(t.isfinite().all() for t in arrived)


@kinds
def test_a_step_that_overflows_changes_no_bit(kind: Kind, backend: str) -> None:
    limits: tuple[dict[str, float], ...] = ({}, {"max_grad_norm": 1.0}, {"max_grad_value": 1.0})
    for i, mix in enumerate(MIXES):
        params = all_dtypes()
        optimizer = kind(params, lr=0.01, **mix, **limits[i % 3])
        train(optimizer, params, 2)
        before = copies(optimizer, params)
        places = [k for k, p in enumerate(params) if p.numel()]
        bad_ones = [(places[0], math.inf), (places[-1], math.nan), (places[4], -math.inf)]
        for count, (place, bad) in enumerate(bad_ones):
            set_grads(params, 3 + count)
            params[place].grad[..., -1] = bad
            optimizer.step()
            assert_same(tensors(optimizer, params), before)
            assert optimizer.skipped.item() == count + 1
            (found,) = optimizer.overflow_report()
            assert found.name.startswith(f"param_groups[0]['params'][{place}] of shape")
            wrong = params[place].grad[..., -1].numel()
            assert (found.inf, found.nan) == ((0, wrong) if math.isnan(bad) else (wrong, 0))
            assert found.elements == params[place].numel()
        train(optimizer, params, 1)
        assert optimizer.skipped.item() == 3
        assert {s["step"].item() for s in optimizer.state.values()} == {3.0}
        assert all(t.isfinite().all() for t in tensors(optimizer, params))


@kinds
def test_under_torchs_scaler_as_under_ours(kind: Kind) -> None:
    """Unscaled inside the step, and by unscale_ before it; an overflow in either."""
    for i, mix in enumerate(MIXES):
        runs = []
        for scaler in (torch.amp.GradScaler("cpu"), GradScaler()):
            params = [p for p in all_dtypes() if p.dtype != torch.float16]  # which torch's refuses
            optimizer = kind(params, lr=0.01, max_grad_norm=1.0 if i % 2 else None, **mix)
            for step in range(6):
                scaler.scale(torch.zeros(()))
                set_grads(params, step, scaler.get_scale())
                if step in (1, 4):
                    params[2].grad[-1] = math.inf
                if step > 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 2.0**14
            assert optimizer.skipped.item() == 2
            assert {s["step"].item() for s in optimizer.state.values()} == {4.0}
            assert not hasattr(optimizer, "found_inf")
            runs.append(tensors(optimizer, params))
        assert_same(*runs)


@kinds
def test_every_found_inf_that_is_not_zero_skips(kind: Kind) -> None:
    """torch's fused optimizers skip only for 1, and apply the step for the 2 of two ranks."""
    for i, flag in enumerate(([2.0], 2.0, 0.5, 1e-45, -1.0, math.inf, math.nan)):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([p], lr=0.1)
        p.grad = torch.ones(3)
        # as torch.amp.GradScaler does
        optimizer.grad_scale = torch.tensor(1.0) if i % 2 else None
        optimizer.found_inf = torch.tensor(flag)
        optimizer.step()
        assert torch.equal(p, torch.ones(3)), flag
        assert (optimizer.state[p]["step"].item(), optimizer.skipped.item()) == (0, 1)


@pytest.mark.filterwarnings("ignore:GradScaler.unscale_. unscaled gradients are rounded")
def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a scaler, with one, and with unscale_; NaN in the last step."""
    with monkeypatch.context() as patched:
        forbid_synchronization(patched)
        for kind, mix in itertools.product(KINDS.values(), MIXES):
            params = all_dtypes()
            groups = [{"params": params[:9]}, {"params": params[9:], "max_grad_norm": 0.1}]
            optimizer = kind(groups, lr=torch.tensor(0.01), max_grad_norm=1.0, **mix)
            train(optimizer, params, 2)
            with torch.no_grad():
                params[4].copy_(params[4] * 2)
            params[0].grad = None
            scaler = GradScaler(grow_on_underflow=0.5)
            for bad, explicit in itertools.product((1.0, math.nan), (False, True)):
                scaler.scale(torch.zeros(()))
                params[2].grad[-1] = bad
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            assert optimizer.grad_norm is not None
    assert scaler.skipped.item() == 2


@kinds
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 2.0**9), (torch.bfloat16, 2.0**9), (torch.float64, 1.0)],
    ids=name,
)
def test_max_grad_value(kind: Kind, dtype: torch.dtype, scale: float) -> None:
    params, other = parameters(dtype), parameters(dtype)
    optimizer, expected = kind(params, lr=0.01, max_grad_value=0.5), kind(other, lr=0.01)
    scaler = GradScaler(init_scale=scale, enabled=scale != 1.0)
    for step in range(3):
        scaler.scale(torch.zeros(()))
        set_grads(params, step, scale)
        set_grads(other, step)
        torch.nn.utils.clip_grad_value_(other, 0.5)
        assert other[3].grad.abs().max() == 0.5
        expected.step()
        scaler.step(optimizer)
        scaler.update()
    assert_same(tensors(optimizer, params), tensors(expected, other))


@kinds
def test_each_group_may_have_its_own_limit(kind: Kind) -> None:
    """A group with a max_grad_norm is clipped by its own norm, the others by theirs together.

    After unscaling, where a scaler drives the step; and the gradients stay as they are.
    """
    shapes = [(3, 5), (0,), (), (129,), (7,), (2, 3, 5)]
    params, other = parameters(shapes=shapes), parameters(shapes=shapes)
    settings = [{}, {"lr": 0.02}, {"lr": 0.1}, {}]
    optimizer, expected = (
        kind([{"params": ps, **own} for ps, own in zip(parts, settings, strict=True)], lr=0.01)
        for parts in ([ps[:1], ps[1:4], ps[4:5], ps[5:]] for ps in (params, other))
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
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
        found = optimizer.group_grad_norms
        assert all(norm.dtype == torch.float64 for norm in found)
        assert [norm.item() for norm in found] == pytest.approx(norms, rel=1e-12)
        assert optimizer.grad_norm.item() == pytest.approx(math.hypot(*norms), rel=1e-12)
    for a, b in zip(tensors(optimizer, params), tensors(expected, other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


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
    plain, _ = trained(AdamW, steps=1)
    assert plain.grad_norm is None
    assert plain.group_grad_norms == [None]
