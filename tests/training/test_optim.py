"""Updates are torch's, Lion's that of its paper; momentum, lr, closures, hooks, schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import name
from optimizers import (
    KINDS,
    Kind,
    PlainLion,
    assert_close,
    assert_same,
    clones,
    kinds,
    master_of,
    parameters,
    set_grads,
    tensors,
    train,
    trained,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW, Lion

ADAM: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"betas": (0.0, 0.5), "weight_decay": 0.0, "maximize": True},
)
MOMENTUM: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True},
)
KINDS_AND_SETTINGS = [
    *((Kind(AdamW, torch.optim.AdamW), settings) for settings in ADAM),
    *((Kind(Adam, torch.optim.Adam), settings) for settings in ADAM),
    *((Kind(SGD, torch.optim.SGD), {"lr": 0.05, **settings}) for settings in MOMENTUM),
    (Kind(Lion, PlainLion), {"lr": 0.01, "weight_decay": 0.1}),
    (Kind(Lion, PlainLion), {"betas": (0.95, 0.98), "maximize": True}),
]
every_setting = pytest.mark.parametrize(("kind", "settings"), KINDS_AND_SETTINGS, ids=str)
SGDS = Kind(SGD, torch.optim.SGD, (("lr", 0.05),))


@every_setting
def test_same_as_torch(kind: Kind, settings: dict, backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        params, other = parameters(dtype), parameters(dtype)
        optimizer, expected = kind(params, **settings), kind.torch(other, **settings)
        for step in range(8):
            train(optimizer, params, 1, step)
            train(expected, other, 1, step)
            assert_close(optimizer, params, expected, other, step + 1)
            assert {s["step"].item() for s in optimizer.state.values()} == {step + 1}


@pytest.mark.parametrize("kind", KINDS_AND_SETTINGS[::3], ids=str)
def test_defaults_and_positions_are_torchs(kind: tuple[Kind, dict]) -> None:
    ours, theirs = kind[0].ours, kind[0].theirs
    args = (0.1, 0.9, 0.0, 0.01, True) if ours is SGD else (0.1, (0.5, 0.6), 1e-3, 0.2)
    for arguments in ((), args):
        mine, expected = ours(parameters(), *arguments), theirs(parameters(), *arguments)
        shared = mine.defaults.keys() & expected.defaults.keys()
        assert {"lr", "weight_decay", "maximize"} < shared
        assert {k: mine.defaults[k] for k in shared} == {k: expected.defaults[k] for k in shared}


def test_options_of_torch_that_change_nothing() -> None:
    for kind in (AdamW, Adam, SGD):
        options = ("foreach", "fused", *(["capturable"] if kind is not SGD else []))
        plain, *others = (
            tensors(*trained(kind, **settings))
            for settings in ({}, dict.fromkeys(options, False), dict.fromkeys(options, True))
        )
        for other in others:
            assert_same(other, plain)


@every_setting
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=name)
def test_a_master_is_an_fp32_run_and_the_param_its_rounding(
    kind: Kind, settings: dict, state_dtype: torch.dtype
) -> None:
    """Bit for bit, from the same gradients; a remainder holds the rest of the same numbers."""
    options = {**settings, "lr": 1e-3, "state_dtype": state_dtype}
    modes = ((torch.bfloat16, "auto"), (torch.float16, "fp32"), (torch.bfloat16, "remainder16"))
    for dtype, mode in modes:
        params = parameters(dtype)
        wide = [torch.nn.Parameter(p.detach().float()) for p in params]
        optimizer, expected = kind(params, master_weights=mode, **options), kind(wide, **options)
        for step in range(12):
            train(optimizer, params, 1, step)
            for p, w in zip(params, wide, strict=True):
                w.grad = p.grad.float()
            expected.step()
        for p, w in zip(params, wide, strict=True):
            state, want = optimizer.state[p], expected.state[w]
            assert torch.equal(master_of(optimizer, p), w)
            tie = (w.detach().view(torch.int32) & 0xFFFF) == 0x8000  # a remainder's rounds away
            assert torch.equal(p[~tie], w[~tie].to(dtype))
            assert state.keys() - want.keys() == {"remainder" if "remainder" in state else "master"}
            assert all(torch.equal(state[key], value) for key, value in want.items())


def test_groups_of_mixed_params() -> None:
    """fp32 norms between bf16 weights, groups with settings of their own."""
    adam: list[dict] = [{"lr": 0.05}, {"weight_decay": 0.7}, {"maximize": True}]
    sgd: list[dict] = [{"momentum": 0.9}, {"lr": 0.01}, {"momentum": 0.5, "nesterov": True}]
    for kind, own in ((KINDS["AdamW"], adam), (SGDS, sgd)):
        params = parameters(torch.bfloat16, [(5,)] * 6)
        for p in params[1::2]:
            p.data = p.data.float()
        wide = [torch.nn.Parameter(p.detach().float()) for p in params]
        optimizer, expected = (
            make([{"params": ps[2 * i : 2 * i + 2], **own[i]} for i in range(3)])
            for make, ps in ((kind, params), (kind.torch, wide))
        )
        for step in range(4):
            set_grads(params, step)
            for p, w in zip(params, wide, strict=True):
                w.grad = p.grad.float()
            optimizer.step()
            expected.step()
        for i, (p, w) in enumerate(zip(params, wide, strict=True)):
            master = p.detach() if i % 2 else optimizer.state[p]["master"]
            torch.testing.assert_close(master, w.detach(), rtol=1e-6, atol=1e-6)
            assert ("master" in optimizer.state[p]) == (i % 2 == 0)


def test_momentum_does_not_begin_with_a_skipped_step() -> None:
    settings = {"momentum": 0.9, "dampening": 0.9}
    params = parameters(torch.bfloat16)
    optimizer = SGDS(params, **settings)
    set_grads(params, 0, math.inf)
    optimizer.step()
    train(optimizer, params, 3)
    assert_same(tensors(optimizer, params), tensors(*trained(SGDS, torch.bfloat16, 3, **settings)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_momentum_switched_on_and_off(dtype: torch.dtype) -> None:
    """As schedules do. A state dict with the buffer that is left over still loads."""
    params = parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, expected = SGDS(params), SGDS.torch(wide)
    for step, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.5]):
        optimizer.param_groups[0]["momentum"] = expected.param_groups[0]["momentum"] = momentum
        train(optimizer, params, 1, step)
        for w, p in zip(wide, params, strict=True):
            w.grad = p.grad.float()
        expected.step()
        for p, w in zip(params, wide, strict=True):
            master = optimizer.state[p].get("master", p.detach())
            torch.testing.assert_close(master, w.detach(), rtol=1e-5, atol=1e-5)
        resumed = SGD(clones(params))
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.param_groups[0]["momentum"] == momentum


SCHEDULES: tuple[Callable, ...] = (
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=9, cycle_momentum=False
    ),
)


@kinds
@pytest.mark.parametrize("i", range(3))
def test_a_tensor_lr_is_its_number(kind: Kind, i: int) -> None:
    """Written in place between steps, as schedules do."""
    dtype = (torch.float32, torch.bfloat16, torch.float64)[i]
    wide = (torch.float32, torch.float64, torch.float32)[i]
    params, other = parameters(dtype), parameters(dtype)
    lr = torch.full(((), (1,), (1, 1))[i], 0.02, dtype=wide)
    optimizer, expected = kind(params, lr=lr), kind(other, lr=lr.item())
    schedule, rates = SCHEDULES[i](optimizer), set()
    for step in range(6):
        rates.add(lr.item())
        expected.param_groups[0]["lr"] = lr.item()
        train(optimizer, params, 1, step)
        train(expected, other, 1, step)
        schedule.step()
    assert len(rates) > 3
    assert optimizer.param_groups[0]["lr"] is lr
    assert_same(tensors(optimizer, params), tensors(expected, other))


@kinds
def test_a_tensor_lr_in_a_state_dict(kind: Kind) -> None:
    lr = torch.tensor(0.01)
    optimizer, _ = trained(kind, torch.bfloat16, lr=lr)
    resumed = kind(parameters(torch.bfloat16))
    resumed.load_state_dict(optimizer.state_dict())
    rate = resumed.param_groups[0]["lr"]
    assert (rate.item(), rate.dtype) == (lr.item(), torch.float32)
    lr.zero_()
    assert rate.item() != 0


@kinds
def test_closures_and_schedulers(kind: Kind) -> None:
    runs = []
    for make in (kind, kind.torch):
        p = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
        optimizer = make([("weight", p)], lr=0.05)
        assert optimizer.param_groups[0]["param_names"] == ["weight"]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.08, total_steps=10)

        def closure(optimizer: Any = optimizer, p: torch.Tensor = p) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(6):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert losses[-1] < losses[0] == 13.0
        group = optimizer.param_groups[0]
        cycled = group.get("betas", (group.get("momentum"),))[0]
        assert cycled != 0.9
        runs.append((losses, p.detach(), group["lr"], cycled))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


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
    assert calls[0] == "before"
    assert calls[-1] == "after"
    assert any(event.name == "Optimizer.step#Watched.step" for event in profile.function_events)
    assert optimizer.state[p]["step"].item() == 1


@pytest.mark.parametrize(
    ("options", "bf16", "fp16", "own"),
    [
        (
            {"master_weights": "remainder16", "max_grad_norm": 1.0},
            *(" with 16-bit remainders", " with FP32 masters", ["max_grad_norm: 1.0"]),
        ),
        (
            {"stochastic_rounding": True, "state_dtype": torch.bfloat16, "max_grad_value": 0.5},
            *(" with stochastic rounding", " with FP32 masters"),
            ["state_dtype: bfloat16", "max_grad_value: 0.5"],
        ),
    ],
)
def test_repr_tells_masters_clipping_and_skips(
    options: dict[str, Any], bf16: str, fp16: str, own: list[str]
) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    params = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    lines = repr(AdamW(params, **options)).splitlines()
    kinds = f"params: 1 bfloat16{bf16}, 1 float16{fp16}, 1 float32"
    told = [f"    {line}" for line in (kinds, *own, "skipped steps: 0")]
    assert lines[: len(told) + 2] == ["AdamW (", *told, "Parameter Group 0"]
    assert "    lr: 0.001" in lines
