"""Gradients that come and go, and params, models and state that others change between steps."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from cases import name, normal
from optimizers import (
    LOW,
    MIXES,
    Kind,
    assert_same,
    clones,
    copies,
    kinds,
    master_of,
    mixed,
    parameters,
    set_grads,
    tensors,
    train,
    trained,
)

from mixprec import cast_parameters
from mixprec.optim import AdamW, fp32_state_dict


@kinds
def test_gradients_that_come_and_go(kind: Kind) -> None:
    """As if each param had been trained alone with the gradients that it got.

    Another set of params has gradients in each step; a group is added on the way.
    """
    for mix in MIXES:
        params = mixed()
        optimizer = kind(params[:3], lr=0.01, **mix)
        grads: list[list[torch.Tensor]] = [[] for _ in params]
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": params[3:], "lr": 0.01})
            set_grads(params, step)
            for i, p in enumerate(params):
                if (step + i) % 3 == 0 or (step == 4 and i < 2):
                    p.grad = None
                elif step >= 2 or i < 3:
                    grads[i].append(p.grad.clone())
            optimizer.step()
        assert [int(optimizer.state[p]["step"]) for p in params] == [3, 3, 4, 3, 2]
        for i, p in enumerate(params):
            alone = mixed()
            single = kind(alone, lr=0.01, **mix)
            for grad in grads[i]:
                alone[i].grad = grad
                single.step()
            assert_same(tensors(single, [alone[i]]), tensors(optimizer, [p]))
            assert set(single.state) == {alone[i]}


@kinds
def test_frozen_and_empty_params(kind: Kind) -> None:
    params = [torch.nn.Parameter(normal(s, torch.bfloat16)) for s in ((0,), (4,), (3, 0), (5,))]
    params[3].requires_grad_(False)
    frozen = params[3].detach().clone()
    optimizer = kind(params, lr=0.1, master_weights="remainder16", max_grad_norm=1.0)
    for step in range(3):
        set_grads(params[:3], step)
        optimizer.step()
    assert torch.equal(params[3], frozen)
    assert set(optimizer.state) == set(params[:3])
    assert [optimizer.state[p]["step"].item() for p in params[:3]] == [3, 3, 3]
    empty = kind([torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))], max_grad_norm=1.0)
    empty.param_groups[0]["params"][0].grad = torch.empty(0, dtype=torch.bfloat16)
    empty.step()
    assert empty.grad_norm.item() == 0
    params[3].requires_grad_(True)  # thawed
    set_grads(params, 4)
    optimizer.step()
    assert optimizer.state[params[3]]["step"] == 1
    assert not torch.equal(params[3], frozen)


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_master_follows_what_was_written_before_the_first_step(dtype: torch.dtype) -> None:
    """Weights that are loaded after the optimizer was made. Writing to .data is not seen."""
    params = parameters(dtype)
    optimizer = AdamW(params, lr=0.0, weight_decay=0.0)  # steps that move nothing
    assert not optimizer.state
    with torch.no_grad():
        for p in params:
            p.mul_(2)
    train(optimizer, params, 1)
    for p, w in zip(params, parameters(dtype), strict=True):
        assert torch.equal(optimizer.state[p]["master"], w.float() * 2)
    params[0].data[0, 0] = 5.0  # the next step overwrites it with the master rounded
    train(optimizer, params, 1)
    assert torch.equal(params[0], parameters(dtype)[0] * 2)
    params[0].data[0, 0] = 5.0
    optimizer.reload_model_params()
    train(optimizer, params, 1)
    assert params[0][0, 0] == optimizer.state[params[0]]["master"][0, 0] == 5.0


@kinds
def test_params_whose_memory_is_replaced(kind: Kind) -> None:
    """`p.data = x`, as vector_to_parameters does, leaves the version of p as it was."""
    params = parameters(torch.bfloat16)
    optimizer = kind(params, lr=0.0, weight_decay=0.0)
    train(optimizer, params, 2)
    vector = torch.nn.utils.parameters_to_vector(params) * 3
    torch.nn.utils.vector_to_parameters(vector, params)
    train(optimizer, params, 1)
    assert torch.equal(torch.nn.utils.parameters_to_vector(params), vector)


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_a_model_cast_to_fp32_goes_on_from_its_masters(kind: Kind, masters: str) -> None:
    """model.float() widens the params in place: not a bit of the FP32 numbers is lost."""
    model = torch.nn.Linear(5, 3).bfloat16()
    optimizer = kind(model.parameters(), lr=1e-3, master_weights=masters)
    params = list(model.parameters())
    train(optimizer, params, 3)
    wide = [torch.nn.Parameter(master_of(optimizer, p).clone()) for p in params]
    expected = kind(wide, lr=1e-3)
    state = copy.deepcopy(optimizer.state_dict())
    for s in state["state"].values():
        s.pop("master", None)
        s.pop("remainder", None)
    expected.load_state_dict(state)
    optimizer.zero_grad()
    model.float()
    train(optimizer, params, 2)
    train(expected, wide, 2)
    assert_same([master_of(optimizer, p) for p in params], [w.detach() for w in wide])


def test_a_model_cast_to_bf16_gets_masters() -> None:
    """model.bfloat16() after the first steps: from then on small updates need masters."""
    model = torch.nn.Linear(5, 3)
    params = list(model.parameters())
    optimizer = AdamW(params, lr=1e-6)
    train(optimizer, params, 2)
    optimizer.zero_grad()
    model.bfloat16()
    train(optimizer, params, 2)
    for p in params:
        assert torch.equal(optimizer.state[p]["master"].bfloat16(), p)


@kinds
@pytest.mark.parametrize("how", ["in place", "another tensor", "loaded", "of one element"])
def test_a_count_that_someone_sets(kind: Kind, how: str) -> None:
    """state[p]["step"] is what counts, however it got there."""
    optimizer, params = trained(kind, lr=0.01)
    other = clones(params)
    expected = kind(other, lr=0.01)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][3]["step"].fill_(7.0)
    expected.load_state_dict(state)
    mine = optimizer.state[params[3]]
    if how == "in place":
        mine["step"].fill_(7.0)
    elif how == "another tensor":
        mine["step"] = torch.tensor(7.0)
    elif how == "loaded":
        optimizer.load_state_dict(state)
    else:
        mine["step"] = torch.tensor([7.0], dtype=torch.float64)
    train(optimizer, params, 2, first=2)
    train(expected, other, 2, first=2)
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 4, 4, 9, 4, 4]
    assert_same(tensors(optimizer, params), tensors(expected, other))


def test_one_count_that_someone_sets_for_all_params() -> None:
    optimizer, params = trained(AdamW)
    shared = torch.tensor(10.0)
    for state in optimizer.state.values():
        state["step"] = shared
    train(optimizer, params, 3)
    assert {s["step"].item() for s in optimizer.state.values()} == {13.0}
    assert shared.item() == 10.0


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_moments_that_someone_replaces(kind: Kind, dtype: torch.dtype) -> None:
    params, other = parameters(dtype), parameters(dtype)
    optimizer, expected = kind(params, lr=0.01), kind(other, lr=0.01)
    for step in range(4):
        train(optimizer, params, 1, step)
        train(expected, other, 1, step)
        for p, o in zip(params, other, strict=True):
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = value.clone()
            for key in expected.state[o].keys() - {"step", "master"}:
                optimizer.state[p][key] = optimizer.state[p][key] * 2
                expected.state[o][key].mul_(2)
    assert_same(tensors(optimizer, params), tensors(expected, other))


@kinds
def test_a_state_that_someone_clears(kind: Kind) -> None:
    """As restarts do: training goes on as with a new optimizer."""
    for mix in MIXES:
        for clear in (
            lambda o: o.state.clear(),
            lambda o: setattr(o, "state", defaultdict(dict)),
            lambda o: o.state.pop(o.param_groups[0]["params"][0]),
        ):
            optimizer, params = trained(kind, torch.bfloat16, shapes=[(9,)], lr=0.01, **mix)
            other = clones(params)
            expected = kind(other, lr=0.01, **mix)
            clear(optimizer)
            train(optimizer, params, 2)
            train(expected, other, 2)
            assert_same(tensors(optimizer, params), tensors(expected, other))


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_dtypes_are_checked_again_at_the_step(key: str) -> None:
    """FSDP and others write optimizer.state themselves, cast to the param's dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        optimizer, params = trained(AdamW, torch.bfloat16, 1)
        state = optimizer.state[params[3]]
        state[key] = state[key].to(dtype)
        before = copies(optimizer, params)
        with pytest.raises(ValueError, match=rf"adamw_: {key}s\[3\] must have dtype float32"):
            train(optimizer, params, 1)
        assert_same(tensors(optimizer, params), before)


@pytest.mark.parametrize("master_weights", ["fp32", "remainder16"])
@pytest.mark.parametrize("loads", [False, True])
def test_a_param_that_was_cast_to_fp32_is_its_own_master(master_weights: str, loads: bool) -> None:
    """It gets back the bits that it lacked, or the values that other code has written."""
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, master_weights=master_weights)
    for step in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        if step == 0:
            wanted = fp32_state_dict(model, optimizer)["weight"]
            model.float()
            if loads:
                wanted = torch.full((64, 64), 7.0)
                model.load_state_dict({"weight": wanted})
    assert optimizer.state[model.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    # A remainder is kept beside whatever is written: less than half a BF16 unit.
    limit = 2.0**-6 if loads and master_weights == "remainder16" else 1e-6
    torch.testing.assert_close(model.weight.detach(), wanted - 1e-3, rtol=0, atol=limit)
    optimizer.load_state_dict(optimizer.state_dict())


def test_the_first_remainders_hold_ties_too() -> None:
    """Values halfway between two BF16 numbers, which the param has rounded to even."""
    bits = torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16 | 0x8000
    model = torch.nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(bits.view(torch.float32).view(16, 16))
    cast_parameters(model, torch.bfloat16)
    optimizer = AdamW(model.parameters(), master_weights="remainder16")
    kept = fp32_state_dict(model, optimizer)["weight"].view(torch.int32).flatten()
    assert (kept - bits).abs().max() <= 1
