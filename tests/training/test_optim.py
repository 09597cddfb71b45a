"""Updates are torch's, Lion's that of its paper; momentum, lr, closures, hooks, schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from cases import name, normal
from optimizers import (
    KINDS,
    Kind,
    Run,
    assert_close,
    assert_same,
    clones,
    kinds,
    parameters,
    same_kinds,
    set_grads,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW


@same_kinds
@pytest.mark.parametrize("settings", [{}, {"lr": 0.05, "weight_decay": 0.2, "maximize": True}])
def test_same_as_torch(kind: Kind, settings: dict, backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        run, expected = Run(kind, dtype, **settings), Run(kind.torch, dtype, **settings)
        for _ in range(8):
            assert_close(run.train(), expected.train())
            assert set(run.counts()) == {run.steps}


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD], ids=name)
def test_defaults_and_positions_are_torchs(kind: type[torch.optim.Optimizer]) -> None:
    """Also with the options of torch that change nothing here."""
    theirs = getattr(torch.optim, kind.__name__)
    args = (0.1, 0.9, 0.0, 0.01, True) if kind is SGD else (0.1, (0.5, 0.6), 1e-3, 0.2)
    ignored = {"foreach": True, "fused": False} | ({} if kind is SGD else {"capturable": True})
    for arguments, options in (((), {}), (args, {}), (args, ignored)):
        params = [torch.nn.Parameter(torch.ones(2))]
        mine, expected = kind(params, *arguments, **options), theirs(params, *arguments, **options)
        shared = mine.defaults.keys() & expected.defaults.keys()
        assert {"lr", "weight_decay", "maximize"} < shared
        assert {k: mine.defaults[k] for k in shared} == {k: expected.defaults[k] for k in shared}
        assert not mine.defaults.keys() & ignored.keys()


@kinds
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=name)
def test_a_master_is_an_fp32_run_and_the_param_its_rounding(
    kind: Kind, state_dtype: torch.dtype
) -> None:
    """Bit for bit, from the same gradients; a remainder holds the rest of the same numbers."""
    options = {"lr": 1e-3, "state_dtype": state_dtype, "max_grad_norm": 1.0}
    modes = ((torch.bfloat16, "auto"), (torch.float16, "fp32"), (torch.bfloat16, "remainder16"))
    for dtype, mode in modes:
        run = Run(kind, dtype, master_weights=mode, **options)
        wide = Run(kind, clones(run.params, torch.float32), **options)
        for _ in range(12):
            wide.follow(run.train())
        assert_same(run.masters(), wide.masters())
        for p, w, state, want in zip(run.params, wide.params, run.states, wide.states, strict=True):
            tie = (w.detach().view(torch.int32) & 0xFFFF) == 0x8000  # a remainder's rounds away
            assert torch.equal(p[~tie], w[~tie].to(dtype))
            assert state.keys() - want.keys() == {"remainder" if "remainder" in state else "master"}
            assert all(torch.equal(state[key], value) for key, value in want.items())


def test_groups_of_mixed_params() -> None:
    """fp32 norms between bf16 weights, groups with settings of their own."""
    adam: list[dict] = [{"lr": 0.05}, {"weight_decay": 0.7}, {"maximize": True}]
    sgd: list[dict] = [{}, {"lr": 0.01, "momentum": 0.0}, {"nesterov": True, "dampening": 0.0}]
    for kind, own in ((KINDS["AdamW"], adam), (KINDS["SGD"], sgd)):

        def grouped(params: list, own: list[dict] = own) -> list[dict]:
            return [{"params": params[2 * i : 2 * i + 2], **own[i]} for i in range(3)]

        dtypes = (torch.bfloat16, torch.float32) * 3
        params = [torch.nn.Parameter(normal((5,), d, seed=i)) for i, d in enumerate(dtypes)]
        run = Run(lambda ps, make=kind: make(grouped(ps)), params)
        expected = Run(lambda ps, make=kind.torch: make(grouped(ps)), clones(params, torch.float32))
        for _ in range(4):
            expected.follow(run.train())
        for master, w in zip(run.masters(), expected.params, strict=True):
            torch.testing.assert_close(master, w.detach(), rtol=1e-6, atol=1e-6)
        assert ["master" in state for state in run.states] == [True, False] * 3


def test_momentum_switched_on_late_is_not_dampened() -> None:
    """torch's first buffer is the plain gradient, whenever it is made; ours in the first step."""
    run = Run(KINDS["SGD"], torch.float32)
    run.set(momentum=0.0, dampening=0.5)
    run.train()
    run.set(momentum=0.9)
    before = clones(run.params)
    with pytest.raises(ValueError, match=r"^SGD: momentum .* needs dampening=0, got dampening=0.5"):
        run.train()
    assert all(map(torch.equal, run.params, before))


@pytest.mark.parametrize("key", [True, False, None])
def test_the_class_decides_what_weight_decay_is(key: bool | None) -> None:
    """Whatever is written into the group after its check."""
    for kind in (KINDS["AdamW"], KINDS["Adam"]):
        run, expected = (Run(kind, torch.float32, weight_decay=0.5) for _ in range(2))
        for group in run.optimizer.param_groups:
            group.pop("decoupled_weight_decay") if key is None else group.update(
                decoupled_weight_decay=key
            )
        assert_same(run.train(), expected.train())


@kinds
def test_a_tensor_lr_is_its_number(kind: Kind) -> None:
    """Written in place between steps, as schedules do; copied by a state dict."""
    for dtype, lr in (
        (torch.float32, torch.tensor(0.02)),
        (torch.bfloat16, torch.tensor([0.02], dtype=torch.float64)),
        (torch.float64, torch.tensor([[0.02]])),
    ):
        run, expected = Run(kind, dtype, lr=lr), Run(kind, dtype)
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
        for _ in range(4):
            expected.set(lr=lr.item())
            assert_same(run.train(), expected.train())
            schedule.step()
        assert lr.item() == pytest.approx(0.02 / 5)
        assert run.optimizer.param_groups[0]["lr"] is lr
        resumed = kind(clones(run.params))
        resumed.load_state_dict(run.optimizer.state_dict())
        rate = resumed.param_groups[0]["lr"]
        assert torch.equal(rate, lr)
        assert (rate.dtype, rate.data_ptr() == lr.data_ptr()) == (lr.dtype, False)


@kinds
def test_a_step_under_a_scaler_runs_hooks_and_schedulers(kind: Kind) -> None:
    """However a step is driven, whoever wrapped or overrode it sees it."""
    p = torch.nn.Parameter(torch.ones(2))
    calls: list[str] = []

    class Watched(kind.ours):
        def step(self, closure: None = None) -> None:
            calls.append("step")
            return super().step(closure)

    optimizer = Watched([p], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = GradScaler()
    scaler.scale(p.sum()).backward()
    with torch.autograd.profiler.profile() as profile:
        scaler.step(optimizer)
    scaler.update()
    schedule.step()  # which warns where optimizer.step was not called
    assert calls.count("step") == 1
    assert (calls[0], calls[-1]) == ("before", "after")
    assert any(event.name == "Optimizer.step#Watched.step" for event in profile.function_events)
    assert optimizer.state[p]["step"].item() == 1


# Clipped gradients and their norms: of all groups, of one, of each element


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
