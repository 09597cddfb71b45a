"""mixprec.optim.SGD: torch's results with momentum in all its forms, and its state dicts."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from cases import GRADS, name
from test_optim_adamw import (
    LOW,
    assert_same,
    copies,
    parameters,
    saved,
    set_grads,
    tensors,
    train,
)

import mixprec
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True},
)


def assert_close(
    optimizer: SGD, params: list, expected: torch.optim.Optimizer, other: list, steps: int
) -> None:
    """Within what `steps` steps of either may round: the buffer holds up to ten gradients (about
    3 each), a param is off by lr = 0.05 times that."""
    for p, o in zip(params, other, strict=True):
        ulp = torch.finfo(p.dtype).eps
        torch.testing.assert_close(p, o, rtol=2 * steps * ulp, atol=2 * steps * ulp)
        theirs = expected.state[o].get("momentum_buffer")
        mine = optimizer.state[p].get("momentum_buffer")
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=4 * steps * ulp, atol=8 * steps * ulp)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_same_as_torch(dtype: torch.dtype, settings: dict) -> None:
    params, other = parameters(dtype), parameters(dtype)
    optimizer, expected = SGD(params, 0.05, **settings), torch.optim.SGD(other, 0.05, **settings)
    for step in range(8):
        train(optimizer, params, 1, step)
        train(expected, other, 1, step)
        assert_close(optimizer, params, expected, other, step + 1)
        assert {s["step"].item() for s in optimizer.state.values()} == {step + 1}


def test_defaults_and_positions_are_torchs() -> None:
    args = (0.1, 0.9, 0.0, 0.01, True)
    mine, theirs = SGD(parameters(), *args), torch.optim.SGD(parameters(), *args)
    assert mine.defaults == {k: theirs.defaults[k] for k in mine.defaults}
    mine, theirs = SGD(parameters()), torch.optim.SGD(parameters())
    assert mine.defaults == {k: theirs.defaults[k] for k in mine.defaults}


@pytest.mark.parametrize("settings", [*SETTINGS, {"momentum": 0.9, "max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_kernel_and_reference_agree_bit_for_bit(dtype: torch.dtype, settings: dict) -> None:
    runs = []
    for backend in ("cpp", "reference"):
        with mixprec.use_backend(backend):
            params = parameters(dtype)
            optimizer = SGD(params, 0.05, **settings)
            scaler = GradScaler(init_scale=2.0**6)
            scaler.scale(torch.zeros(()))
            for step in range(4):
                set_grads(params, step, 2.0**6 if step != 2 else math.inf)
                scaler.step(optimizer)
                scaler.update()
                train(optimizer, params, 1, step)
            runs.append(tensors(optimizer, params))
            assert scaler.skipped.item() == 1
    if "max_grad_norm" in settings:  # sums of another order: the clip may differ by an ULP
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=8 * torch.finfo(a.dtype).eps, atol=1e-7)
    else:
        assert_same(*runs)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_master_is_an_fp32_run(dtype: torch.dtype, settings: dict) -> None:
    params = parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, expected = SGD(params, 0.01, **settings), SGD(wide, 0.01, **settings)
    for step in range(10):
        train(optimizer, params, 1, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        expected.step()
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master"], w)
        assert torch.equal(p, w.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_groups_with_momentum_and_without(dtype: torch.dtype) -> None:
    params, other = parameters(dtype), parameters(dtype)

    def groups(ps: list) -> list[dict]:
        return [
            {"params": ps[:2], "momentum": 0.9},
            {"params": ps[2:4], "lr": 0.01, "weight_decay": 0.2},
            {"params": ps[4:], "momentum": 0.5, "nesterov": True, "maximize": True},
        ]

    optimizer, expected = SGD(groups(params), 0.05), torch.optim.SGD(groups(other), 0.05)
    train(optimizer, params, 6)
    train(expected, other, 6)
    assert_close(optimizer, params, expected, other, 6)
    assert [len(optimizer.state[p]) for p in params] == [2, 2, 1, 1, 2, 2]


def test_momentum_begins_with_each_params_first_gradient() -> None:
    """Dampening does not apply to it, as in torch, whenever it comes."""
    params, other = parameters(), parameters()
    settings = {"momentum": 0.9, "dampening": 0.9}
    optimizer, expected = SGD(params, 0.05, **settings), torch.optim.SGD(other, 0.05, **settings)
    for step in range(6):
        set_grads(params, step)
        set_grads(other, step)
        for ps in (params, other):
            for p in ps[step:]:  # one more param has a gradient in each step
                p.grad = None
        optimizer.step()
        expected.step()
    assert_close(optimizer, params[:5], expected, other[:5], 6)
    assert [optimizer.state[p]["step"].item() for p in params[:5]] == [5, 4, 3, 2, 1]
    assert not optimizer.state[params[5]]


def test_a_skipped_first_step_is_not_the_first() -> None:
    params, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    settings = {"momentum": 0.9, "dampening": 0.9}
    optimizer, expected = SGD(params, 0.05, **settings), SGD(other, 0.05, **settings)
    set_grads(params, 0, math.inf)
    optimizer.step()
    train(optimizer, params, 3)
    train(expected, other, 3)
    assert_same(tensors(optimizer, params), tensors(expected, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_momentum_switched_on_and_off(dtype: torch.dtype) -> None:
    """As schedules do. A buffer that momentum has left behind is no other optimizer's state."""
    params, wide = parameters(dtype), parameters(torch.float32)
    with torch.no_grad():
        for w, p in zip(wide, params, strict=True):
            w.copy_(p)
    optimizer, expected = SGD(params, 0.05), torch.optim.SGD(wide, 0.05)
    for step, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.5]):
        optimizer.param_groups[0]["momentum"] = expected.param_groups[0]["momentum"] = momentum
        train(optimizer, params, 1, step)
        for w, p in zip(wide, params, strict=True):
            w.grad = p.grad.to(w.dtype)
        expected.step()
        for p, w in zip(params, wide, strict=True):
            truth = optimizer.state[p].get("master", p.detach())
            torch.testing.assert_close(truth, w.detach(), rtol=1e-5, atol=1e-5)
        other = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = SGD(other)
        resumed.load_state_dict(saved(optimizer.state_dict()))
        assert resumed.param_groups[0]["momentum"] == momentum


# State dicts


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_a_state_dict_resumes_exactly(dtype: torch.dtype, settings: dict) -> None:
    params = parameters(dtype)
    optimizer = SGD(params, 0.05, **settings)
    train(optimizer, params, 3)
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = SGD(other)
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.05
    assert_same(tensors(resumed, other), tensors(optimizer, params))
    train(optimizer, params, 3, first=3)
    train(resumed, other, 3, first=3)
    assert_same(tensors(resumed, other), tensors(optimizer, params))


@pytest.mark.parametrize("loop", ["plain", "fused", "foreach", "old"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_interchange_with_torch(dtype: torch.dtype, settings: dict, loop: str) -> None:
    """A run that changes its optimizer every few steps ends where one of torch's alone ends."""
    other, params = parameters(dtype), parameters(dtype)
    expected = torch.optim.SGD(other, 0.05, **settings)
    train(expected, other, 9)
    option = {} if loop in ("plain", "old") else {loop: True}
    theirs = torch.optim.SGD(params, 0.05, **settings, **option)
    train(theirs, params, 3)
    state = saved(theirs.state_dict())
    if loop == "old":  # torch once kept None where there was no buffer, and had fewer options
        for i in range(len(params)):
            state["state"].setdefault(i, {"momentum_buffer": None})
        for key in ("foreach", "fused", "differentiable"):
            del state["param_groups"][0][key]
        if not settings.get("maximize"):
            del state["param_groups"][0]["maximize"]
    mine = SGD(params)
    mine.load_state_dict(state)
    assert mine.param_groups[0]["lr"] == 0.05
    train(mine, params, 3, first=3)
    theirs = torch.optim.SGD(params, **option)
    theirs.load_state_dict(saved(mine.state_dict()))
    train(theirs, params, 3, first=6)
    assert_close(theirs, params, expected, other, 9)


def test_a_buffer_of_torch_has_begun_and_a_param_without_one_has_not() -> None:
    params, other = parameters(), parameters()
    settings = {"lr": 0.05, "momentum": 0.9, "dampening": 0.9}
    theirs = torch.optim.SGD(params, **settings)
    expected = torch.optim.SGD(other, **settings)
    for optimizer, ps in ((theirs, params), (expected, other)):
        set_grads(ps[:3], 0)
        optimizer.step()
    mine = SGD(params)
    mine.load_state_dict(theirs.state_dict())
    assert [len(mine.state[p]) for p in params] == [2, 2, 2, 0, 0, 0]
    train(mine, params, 3, first=1)
    train(expected, other, 3, first=1)
    assert_close(mine, params, expected, other, 4)


@pytest.mark.parametrize(
    "damage",
    [
        {"momentum_buffer": torch.zeros(1)},
        {"momentum_buffer": torch.zeros(129, dtype=torch.float64)},
        {"momentum_buffer": torch.zeros(129, dtype=torch.int32)},
        {"momentum_buffer": 3.0},
        {"step": -1.0},
        {"step": 0.5},
        {"step": math.nan},
        {"step": 2.0**24},
        {"step": torch.zeros(2)},
        {"master": torch.zeros(129)},
        {"remainder": torch.zeros(129, dtype=torch.int16)},
        {"exp_avg": torch.zeros(129)},
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: dict) -> None:
    params = parameters()
    optimizer = SGD(params, 0.05, momentum=0.9)
    train(optimizer, params, 2)
    before = copies(optimizer, params)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][3] |= damage
    state["param_groups"][0]["lr"] = 7.0
    (key,) = damage
    with pytest.raises(ValueError, match=rf"^SGD.load_state_dict: .*{key}"):
        optimizer.load_state_dict(state)
    assert_same(tensors(optimizer, params), before)
    assert optimizer.param_groups[0]["lr"] == 0.05
    train(optimizer, params, 1)


# Errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, "lr must be a finite number, 0 or more, got -1.0"),
        ({"lr": math.inf}, "lr must be a finite number"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one"),
        ({"momentum": -0.1}, "momentum must be a finite number, 0 or more, got -0.1"),
        ({"momentum": torch.tensor(0.9)}, "momentum must be a finite number, .* got a tensor"),
        ({"dampening": math.nan}, "dampening must be a finite number, 0 or more, got nan"),
        ({"weight_decay": -1e-9}, "weight_decay must be"),
        ({"nesterov": True}, "nesterov needs a momentum above 0 and no dampening, got momentum=0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs a momentum above"),
    ],
    ids=str,
)
def test_bad_settings(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"^SGD: {words}"):
        SGD(parameters(), **settings)
    optimizer = SGD(parameters())
    with pytest.raises(ValueError, match=f"^SGD: {words}"):
        optimizer.add_param_group({"params": parameters(), **settings})
    assert len(optimizer.param_groups) == 1
    state = optimizer.state_dict()
    state["param_groups"] = [{**state["param_groups"][0], **settings}]
    with pytest.raises(ValueError, match=f"^SGD.load_state_dict: {words}"):
        optimizer.load_state_dict(state)


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(table.parameters(), momentum=0.9)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"^SGD: gradients must be dense, .*sparse=False"):
        optimizer.step()
    assert not optimizer.state[table.weight]
