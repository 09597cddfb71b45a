"""AdamW, Adam and SGD: torch's results, masters, clipping, skipping, hooks, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import GRADS, name
from optimizers import (
    KINDS,
    LOW,
    MIXES,
    Kind,
    all_dtypes,
    assert_close,
    assert_same,
    clones,
    copies,
    kinds,
    parameters,
    set_grads,
    tensors,
    train,
    trained,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW

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
]
every_setting = pytest.mark.parametrize(("kind", "settings"), KINDS_AND_SETTINGS, ids=str)
SGDS = Kind(SGD, torch.optim.SGD, (("lr", 0.05),))


# The update


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


@every_setting
def test_a_master_is_an_fp32_run_and_the_param_its_rounding(kind: Kind, settings: dict) -> None:
    for dtype, mode in zip(LOW, ("auto", "fp32"), strict=True):
        params = parameters(dtype)
        wide = [torch.nn.Parameter(p.detach().float()) for p in params]
        optimizer = kind(params, master_weights=mode, **{**settings, "lr": 1e-3})
        expected = kind(wide, **{**settings, "lr": 1e-3})
        for step in range(12):
            train(optimizer, params, 1, step)
            for p, w in zip(params, wide, strict=True):
                w.grad = p.grad.float()
            expected.step()
        for p, w in zip(params, wide, strict=True):
            assert torch.equal(optimizer.state[p]["master"], w)
            assert torch.equal(p, w.to(dtype))
            assert "master" not in expected.state[w]


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


# Momentum


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


# Clipping and skipping


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
            assert not params[3].isfinite().all()


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


# Hooks, closures, groups


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


# Errors


BAD: list[tuple[tuple[type, ...], dict[str, Any], str]] = [
    ((AdamW, Adam, SGD), {"lr": -1.0}, "lr must be a finite number, 0 or more, got -1.0"),
    ((AdamW, SGD), {"lr": math.nan}, "lr must be"),
    ((AdamW, SGD), {"lr": math.inf}, "lr must be"),
    ((AdamW, SGD), {"lr": torch.ones(2)}, "lr must be a number or a tensor of one fp32 or fp64 el"),
    ((AdamW, SGD), {"lr": torch.tensor(1)}, "lr must be a number or a tensor of one fp32 or fp64"),
    ((AdamW, SGD), {"weight_decay": math.nan}, "weight_decay must be a finite number, 0 or more"),
    ((AdamW, Adam), {"betas": (1.0, 0.9)}, r"betas\[0\] must be a number in \[0, 1\), got 1.0"),
    ((AdamW,), {"betas": (0.9, -0.1)}, r"betas\[1\] must be"),
    ((AdamW,), {"betas": (0.9,)}, "betas must be"),
    ((AdamW,), {"eps": -1e-8}, "eps must be"),
    ((SGD,), {"momentum": -0.1}, "momentum must be a finite number, 0 or more, got -0.1"),
    ((SGD,), {"momentum": torch.tensor(0.9)}, "momentum must be a finite number, .* got a tensor"),
    ((SGD,), {"dampening": math.nan}, "dampening must be a finite number, 0 or more, got nan"),
    ((SGD,), {"nesterov": True}, "nesterov needs a momentum above 0 and no dampening, got momentu"),
    ((SGD,), {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs a momentum"),
    ((AdamW, SGD), {"max_grad_norm": -1.0}, "max_grad_norm must be positive"),
]


@pytest.mark.parametrize(("ours", "settings", "message"), BAD, ids=str)
def test_bad_settings(ours: tuple[type, ...], settings: dict, message: str) -> None:
    """In the constructor, in a group of its own, and in a state dict."""
    for kind in ours:
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
            kind(parameters(), **settings)
        optimizer = kind(parameters())
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
            optimizer.add_param_group({"params": parameters(), **settings})
        assert len(optimizer.param_groups) == 1
        state = optimizer.state_dict()
        state["param_groups"] = [{**state["param_groups"][0], **settings}]
        with pytest.raises(ValueError, match=f"^{kind.__name__}.load_state_dict: {message}"):
            optimizer.load_state_dict(state)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"differentiable": True}, "differentiable must be False"),
    ({"master_weights": "bf16"}, 'master_weights must be "auto", "fp32", "remainder16" or No'),
    ({"master_weights": True}, "master_weights must be"),
    ({"state_dtype": "bfloat16"}, "state_dtype must be torch.float32 or torch.bfloat16, got '"),
    ({"state_dtype": torch.float16}, "state_dtype must be"),
    ({"stochastic_rounding": 1}, "stochastic_rounding must be True or False"),
    ({"stochastic_rounding": True, "master_weights": "fp32"}, "stochastic_rounding is for"),
    ({"stochastic_rounding": True, "master_weights": "remainder16"}, "stochastic_rounding is"),
    ({"seed": -1}, r"seed must be an int in \[0, 2\^63\), got -1"),
    ({"seed": 2**63}, "seed must be"),
    ({"seed": 0.5}, "seed must be"),
    ({"grad_dtype": torch.bfloat16}, "grad_dtype must be torch.float32 or None"),
    ({"grad_dtype": "float32"}, "grad_dtype must be"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
    ({"max_grad_norm": math.nan}, "max_grad_norm must be positive, got nan"),
    ({"max_grad_value": -1.0}, "max_grad_value must be positive, got -1.0"),
    ({"max_grad_norm": 1.0, "max_grad_value": 1.0}, "give max_grad_norm or max_grad_value, no"),
]


def test_bad_options() -> None:
    for kind in (AdamW, Adam, SGD):
        for options, message in BAD_OPTIONS:
            with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
                kind(parameters(torch.bfloat16), **options)
    with pytest.raises(ValueError, match=r"^AdamW: amsgrad is not supported"):
        AdamW(parameters(), amsgrad=True)
    with pytest.raises(TypeError):  # torch.optim.SGD has none either
        SGD(parameters(), capturable=True)


def test_options_of_torch_that_change_nothing() -> None:
    for kind in (AdamW, Adam, SGD):
        options = ("foreach", "fused", *(["capturable"] if kind is not SGD else []))
        plain, *others = (
            tensors(*trained(kind, **settings))
            for settings in ({}, dict.fromkeys(options, False), dict.fromkeys(options, True))
        )
        for other in others:
            assert_same(other, plain)


@kinds
def test_sparse_gradients_and_params_of_other_dtypes_are_refused(kind: Kind) -> None:
    who = kind.ours.__name__
    table = torch.nn.Embedding(4, 2, sparse=True)
    dense = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([dense, *table.parameters()])
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(ValueError, match=rf"^{who}: gradients must be dense, .*sparse=False"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2))
    table.weight.grad = torch.zeros(4, 2)
    optimizer.step()
    before = copies(optimizer, [dense, table.weight])
    table.weight.grad = torch.zeros(4, 2).to_sparse()  # and after a step that was dense
    with pytest.raises(ValueError, match=r"must be .*dense"):
        optimizer.step()
    assert_same(tensors(optimizer, [dense, table.weight]), before)
    for dtype in (torch.complex64, torch.int32):
        p = torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        with pytest.raises(ValueError, match=f"^{who}: params must be fp32, bf16, fp16 or fp64"):
            kind([p])
