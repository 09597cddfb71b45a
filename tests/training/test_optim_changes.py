"""Gradients that come and go, and params, models and state that others change between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import name
from optimizers import LOW, Kind, Run, assert_same, kinds, mixed, parameters, set_grads

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import AdamW


@kinds
def test_gradients_that_come_and_go(kind: Kind) -> None:
    """As if each param had been trained alone with the gradients that it got: its noise, too.

    Another set of params has gradients in each step; a group is added on the way.
    """

    def several() -> list[torch.nn.Parameter]:
        return [*mixed(), *parameters(torch.bfloat16, [(33,)])]

    for mix in kind.mixes:
        params = several()
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
        assert [int(optimizer.state[p]["step"]) for p in params] == [3, 3, 4, 3, 2, 3]
        for i, p in enumerate(params):
            alone = Run(kind, several(), lr=0.01, **mix)
            for grad in grads[i]:
                alone.params[i].grad = grad
                alone.optimizer.step()
            assert set(alone.optimizer.state) == {alone.params[i]}
            assert torch.equal(alone.params[i], p)
            got, want = (dict(state) for state in (optimizer.state[p], alone.states[i]))
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@kinds
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_master_follows_what_others_write(kind: Kind, dtype: torch.dtype) -> None:
    """Weights that are loaded after the optimizer was made; memory that is replaced, which leaves
    the version of a param as it was. A write to .data is not seen, unless one says so."""
    run = Run(kind, dtype, lr=0.0, weight_decay=0.0)  # steps that move nothing
    assert not run.optimizer.state
    with torch.no_grad():
        for p in run.params:
            p.mul_(2)
    want = [p.detach().clone() for p in run.params]
    assert_same(run.train().masters(), [w.float() for w in want])
    run.params[0].data[0, 0] = 5.0  # the next step overwrites it with the master rounded
    assert_same([p.detach() for p in run.train().params], want)
    run.params[0].data[0, 0] = want[0][0, 0] = 5.0
    run.optimizer.reload_model_params()
    assert_same(run.train().masters(), [w.float() for w in want])
    vector = torch.nn.utils.parameters_to_vector(run.params) * 3
    torch.nn.utils.vector_to_parameters(vector.clone(), run.params)
    run.train()
    assert torch.equal(torch.nn.utils.parameters_to_vector(run.params), vector)


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16", "remainder8"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_model_cast_to_fp32_goes_on_from_its_masters(
    kind: Kind, masters: str, writes: bool
) -> None:
    """model.float() widens the params in place, and not a bit of the FP32 numbers is lost; or from
    the values that other code has written since: a remainder stays beside them."""
    model = torch.nn.Linear(5, 3).bfloat16()
    run = Run(kind, list(model.parameters()), lr=1e-3, master_weights=masters).train(3)
    wide = [torch.nn.Parameter(master) for master in run.masters()]
    state = copy.deepcopy(run.optimizer.state_dict())
    for s in state["state"].values():
        del s["master" if masters == "auto" else "remainder"]
    run.optimizer.zero_grad()
    model.float()
    if writes:
        with torch.no_grad():
            for p in (*run.params, *wide):
                p.fill_(7.0)
    expected = Run(kind, wide, lr=1e-3)
    expected.optimizer.load_state_dict(state)
    expected.steps = run.steps
    run.train(2)
    expected.train(2)
    if writes and masters != "auto":  # less than half a BF16 unit of 7
        for p, w in zip(run.params, wide, strict=True):
            torch.testing.assert_close(p, w, rtol=0, atol=2.0**-6)
    else:
        assert_same(run, expected)
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def test_a_model_cast_to_bf16_gets_masters() -> None:
    """model.bfloat16() after the first steps: from then on small updates need masters."""
    model = torch.nn.Linear(5, 3)
    run = Run(AdamW, list(model.parameters()), lr=1e-6).train(2)
    run.optimizer.zero_grad()
    model.bfloat16()
    run.train(2)
    assert_same([s["master"].bfloat16() for s in run.states], [p.detach() for p in run.params])


@kinds
@pytest.mark.parametrize("how", ["in place", "of one element", "shared"])
def test_a_count_that_someone_sets(kind: Kind, how: str) -> None:
    """state[p]["step"] is what counts, however it got there."""
    run, expected = (Run(kind, lr=0.01).train(2) for _ in range(2))
    chosen = range(len(run.params)) if how == "shared" else [3]
    state = copy.deepcopy(run.optimizer.state_dict())
    for i in chosen:
        state["state"][i]["step"].fill_(7.0)
    expected.optimizer.load_state_dict(state)
    count = torch.tensor(7.0 if how == "shared" else [7.0], dtype=torch.float64)
    for i in chosen:
        if how == "in place":
            run.states[i]["step"].fill_(7.0)
        else:
            run.states[i]["step"] = count
    for each in (run, expected):
        each.train(2)
    assert run.counts() == [9 if i in chosen else 4 for i in range(len(run.params))]
    assert count.item() == 7.0
    assert_same(run, expected)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_moments_that_someone_replaces(kind: Kind, dtype: torch.dtype) -> None:
    run, expected = (Run(kind, dtype, lr=0.01) for _ in range(2))
    for _ in range(4):
        for mine, other in zip(run.train().states, expected.train().states, strict=True):
            for key, value in mine.items():
                factor = 1 if key in ("step", "master") else 2
                mine[key] = value * factor
                other[key].mul_(factor)
    assert_same(run, expected)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_dtypes_are_checked_again_at_the_step(key: str) -> None:
    """FSDP and others write optimizer.state themselves, cast to the param's dtype. A step that
    fails leaves no trace of its scaler on the optimizer."""
    scaler = GradScaler()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        run = Run(AdamW, torch.bfloat16).train()
        run.states[3][key] = run.states[3][key].to(dtype)
        before = run.copies()
        set_grads(run.params, 1, scaler.scale(torch.ones(())).item())
        with pytest.raises(ValueError, match=rf"adamw_: {key}s\[3\] must have dtype float32"):
            scaler.step(run.optimizer)
        assert_same(run.tensors(), before)
        assert run.optimizer._current_scaling() == (None, None)
