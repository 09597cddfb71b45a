"""Masters: another optimizer over FP32 masters, against the same thing written out."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from cases import normal
from optimizers import Params, Run, assert_same, clones, set_grads, through_a_file

import mixprec
from mixprec.optim import Masters, fp32_state_dict

KINDS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Muon: {"lr": 0.02, "weight_decay": 0.1},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "maximize": True},
    torch.optim.NAdam: {"lr": 0.01},
    torch.optim.Adafactor: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "fused": True, "amsgrad": True},
    torch.optim.Adam: {"lr": 0.01, "foreach": True},
    torch.optim.RAdam: {"lr": 0.01},
    torch.optim.Adagrad: {"lr": 0.1, "initial_accumulator_value": 0.1},
    torch.optim.RMSprop: {"lr": 0.01, "centered": True, "momentum": 0.9},
    torch.optim.Adamax: {"lr": 0.01},
    torch.optim.Adadelta: {},
    torch.optim.ASGD: {"lr": 0.1, "t0": 2},
    torch.optim.Rprop: {},
}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def params_of(*dtypes: torch.dtype) -> Params:
    return [torch.nn.Parameter(normal((6, 4), dtype, seed=i)) for i, dtype in enumerate(dtypes)]


@each_kind
@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_fp32_weights_that_are_rounded(kind: type, clip: float | None) -> None:
    """Also across an overflow, a scheduler, and params that get gradients later."""
    params = params_of(torch.bfloat16, torch.float16, torch.float32)
    masters = clones(params, torch.float32)
    ours = Masters(kind, params, max_grad_norm=clip, **KINDS[kind])
    torchs = kind(masters, **KINDS[kind])
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, torchs)]
    scaler = mixprec.GradScaler(init_scale=8.0, growth_interval=100)
    scaler.scale(torch.zeros(()))
    for step in range(5):
        overflows = step == 2
        set_grads(params, step, 8.0)
        if step < 3:
            params[1].grad = None
        for p, master in zip(params, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float() / scaler.get_scale()
        if overflows:
            params[0].grad[1, 2] = float("inf")
        scaler.step(ours)
        scaler.update()
        assert ours.last_step_skipped is overflows
        if not overflows:
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(masters, clip)
                torch.testing.assert_close(ours.grad_norm.float(), norm)
            torchs.step()
            for schedule in schedules:
                schedule.step()
        for p, master in zip(params, masters, strict=True):
            kept = ours.state[p].get("master", p).float()
            if clip is None:
                assert torch.equal(kept, master)
                assert torch.equal(p, master.to(p.dtype))
            else:  # torch multiplies by a coefficient in FP32 with 1e-6 in its denominator
                torch.testing.assert_close(kept, master, rtol=1e-4, atol=1e-5)
    assert ours.skipped == 1
    model = torch.nn.ParameterList(params)
    assert torch.equal(fp32_state_dict(model, ours)["0"], ours.state[params[0]]["master"])


@each_kind
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run(kind: type) -> None:
    """With masters of what cast_parameters rounded, from the first step on and before it."""

    def cast(seed: int) -> Run:
        params = [torch.nn.Parameter(normal((6, 4), torch.float32, seed + i)) for i in range(2)]
        exact.append([p.detach().clone() for p in params])
        mixprec.cast_parameters(torch.nn.ParameterList(params[:1]), torch.bfloat16)
        return Run(partial(Masters, kind), params, **KINDS[kind])

    exact: list[list[torch.Tensor]] = []
    run, others = cast(0), []
    for step in range(3):
        other = cast(5)
        for p, w in zip(other.params, run.params, strict=True):
            p.data.copy_(w)
        saved = run.optimizer.state_dict()
        other.optimizer.load_state_dict(through_a_file(saved))
        assert other.optimizer.state_dict()["param_groups"] == saved["param_groups"]
        kept = fp32_state_dict(torch.nn.ParameterList(run.params[:1]))["0"]
        assert torch.equal(saved["state"][0]["master"], kept)
        if step == 0:
            assert torch.equal(kept, exact[0][0])
        else:
            assert_same(other, run)
        other.steps = step
        others += [other, copy.deepcopy(run), pickle.loads(pickle.dumps(run))]
        run.train()
    for other in others:
        assert_same(other.train(3 - other.steps), run)


def test_an_empty_state_stays_in_the_state_dict() -> None:
    run = Run(partial(Masters, torch.optim.SGD), params_of(torch.float32, torch.bfloat16)).train()
    saved = run.optimizer.state_dict()
    assert [state.keys() for state in saved["state"].values()] == [set(), {"master"}]
    run.optimizer.load_state_dict(saved)
    assert run.optimizer.state_dict()["state"].keys() == saved["state"].keys()


class Unusual(torch.optim.Optimizer):
    """Keeps a list, a name and a state of no param, counts its steps in its groups, as
    schedule-free optimizers do, and needs a step in FP32 on the device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "capturable": True, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if not (state := self.state[p]):
                state |= {"parts": [torch.zeros_like(p)], "name": "sum", "step": torch.zeros(())}
                state |= {"x": torch.ones(3, dtype=torch.uint8), "x_scale": 2.0}
            state["step"] += 1
            state["parts"][0] += p.grad / 3
            p -= state["parts"][0] * self.state["calls"]


def test_a_state_of_any_kind_is_saved_and_loaded_as_it_is() -> None:
    run, other = (Run(partial(Masters, Unusual), params_of(torch.bfloat16)) for _ in range(2))
    saved = run.train(2).optimizer.fp32_state_dict()
    other.optimizer.load_state_dict(saved)
    state = other.states[0]
    assert state["parts"][0].dtype == torch.float32
    assert torch.equal(state["parts"][0], saved["state"][0]["parts"][0])
    assert state["parts"][0] is not saved["state"][0]["parts"][0]
    assert (state["name"], state["x_scale"], other.optimizer.state["calls"]) == ("sum", 2.0, 2)
    other.params[0].data.copy_(run.params[0])
    other.steps = 2
    assert_same(other.train(2).masters(), run.train(2).masters())
    assert run.optimizer.state["calls"] == 4
    there = Run(partial(Masters, Unusual), [torch.nn.Parameter(run.params[0].to("meta"))])
    there.optimizer.load_state_dict(run.optimizer.state_dict())
    (state,) = there.states
    assert {state["step"].device.type, state["parts"][0].device.type} == {"meta"}


def test_the_other_optimizer_steps_once_for_all_groups_and_keeps_its_settings() -> None:
    params = params_of(torch.bfloat16, torch.float32, torch.bfloat16)
    optimizer = Masters(Unusual, [{"params": params[:2]}])
    set_grads(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[2:]})
    for _ in range(2):
        optimizer.step()
    assert [group["k"] for group in optimizer.param_groups] == [3, 2]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "the step of LBFGS needs a closure"),
        (mixprec.optim.AdamW, r"mixprec.optim.AdamW keeps masters itself"),
        (torch.nn.Linear, "kind must be a class of optimizers, got <class"),
    ],
)
def test_classes_that_cannot_be_used(kind: type, message: str) -> None:
    with pytest.raises(TypeError, match=f"^Masters: {message}"):
        Masters(kind, params_of(torch.bfloat16))
