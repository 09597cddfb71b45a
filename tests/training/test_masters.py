"""Masters: another optimizer over FP32 masters, against the same thing written out."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from cases import normal

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


def params_of(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(normal((6, 4), torch.float32, seed=i).to(dtype))
        for i, dtype in enumerate(dtypes)
    ]


def set_grads(params: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = (normal(p.shape, torch.float32, seed=50 * step + i) * scale).to(p.dtype)


@each_kind
@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_fp32_weights_that_are_rounded(kind: type, clip: float | None) -> None:
    """Also across an overflow, a scheduler, and params that get gradients later."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    params = params_of(*dtypes)
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
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
                torchs_grads = [m.grad for m in masters if m.grad is not None]
                assert torch.stack([g.norm() for g in torchs_grads]).norm() < clip * 1.001
            torchs.step()
            for schedule in schedules:
                schedule.step()
        for p, master in zip(params, masters, strict=True):
            kept = ours.state[p].get("master", p) if ours.state[p] else p.float()
            if clip is None:
                assert torch.equal(kept, master)
                assert torch.equal(p, master.to(p.dtype))
            else:  # torch multiplies by a coefficient in FP32 with 1e-6 in its denominator
                torch.testing.assert_close(kept, master, rtol=1e-4, atol=1e-5)
    assert ours.skipped == 1
    model = torch.nn.ParameterList(params)
    assert torch.equal(fp32_state_dict(model, ours)["0"], ours.state[params[0]]["master"])


@each_kind
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_resumes_bit_for_bit(kind: type, way: str) -> None:
    params = params_of(torch.bfloat16, torch.float32)
    optimizer = Masters(kind, params, **KINDS[kind])
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    if way == "deepcopy":
        again, optimizer_again = copy.deepcopy((params, optimizer))
    else:
        file = io.BytesIO()
        saved = optimizer.state_dict() if way == "state_dict" else optimizer
        torch.save((params, saved), file)
        file.seek(0)
        again, loaded = torch.load(file, weights_only=False)
        optimizer_again = loaded
        if way == "state_dict":
            optimizer_again = Masters(kind, again, **KINDS[kind])
            optimizer_again.load_state_dict(loaded)
    for step in range(3, 6):
        for some, stepped in ((params, optimizer), (again, optimizer_again)):
            set_grads(some, step)
            stepped.step()
    for a, b in zip(params, again, strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(optimizer_again.state[b][name])
            )


@each_kind
def test_parameters_that_were_cast_keep_their_bits_through_a_checkpoint(kind: type) -> None:
    """Those of cast_parameters, from the first step on and before it; saved and loaded alike."""

    def cast_model(seed: int) -> tuple[torch.nn.Module, Masters]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(6, 4, bias=kind is not torch.optim.Muon)
        wide.append([p.detach().clone() for p in model.parameters()])
        mixprec.cast_parameters(model, torch.bfloat16)
        return model, Masters(kind, model.parameters(), **KINDS[kind])

    wide: list[list[torch.Tensor]] = []
    model, optimizer = cast_model(0)
    for step in range(3):
        other, resumed = cast_model(1)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        saved, loaded = optimizer.state_dict(), resumed.state_dict()
        assert saved["param_groups"] == loaded["param_groups"]
        for a, b in zip(saved["state"].values(), loaded["state"].values(), strict=True):
            assert a.keys() == b.keys() >= {"master"}
            assert all(v.dtype == b[k].dtype and torch.equal(v, b[k]) for k, v in a.items())
        if step == 0:
            assert all(torch.equal(a, s["master"]) for a, s in zip(
                wide[0], saved["state"].values(), strict=True))  # fmt: skip
        for each, stepped in ((model, optimizer), (other, resumed)):
            set_grads([*each.parameters()], step)
            stepped.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[p]["master"], resumed.state[q]["master"])
            assert torch.equal(p, q)


def test_an_empty_state_stays_in_the_state_dict() -> None:
    params = params_of(torch.float32, torch.bfloat16)
    optimizer = Masters(torch.optim.SGD, params, lr=0.1)
    set_grads(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert [state.keys() for state in saved["state"].values()] == [set(), {"master"}]
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()


class Unusual(torch.optim.Optimizer):
    """Keeps a list, a name and a state of no param, and needs a step in FP32 on the device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if not (state := self.state[p]):
                state |= {"parts": [torch.zeros_like(p)], "name": "sum", "step": torch.zeros(())}
                state |= {"x": torch.ones(3, dtype=torch.uint8), "x_scale": 2.0}
            state["step"] += 1
            state["parts"][0] += p.grad / 3
            p -= state["parts"][0] * self.state["calls"]


def test_a_state_of_any_kind_is_saved_and_loaded_as_it_is() -> None:
    params, other = params_of(torch.bfloat16), params_of(torch.bfloat16)
    optimizer, resumed = Masters(Unusual, params), Masters(Unusual, other)
    for step in range(4):
        if step == 2:
            saved = optimizer.fp32_state_dict()
            resumed.load_state_dict(saved)
            state = resumed.state[other[0]]
            assert state["parts"][0].dtype == torch.float32
            assert torch.equal(state["parts"][0], saved["state"][0]["parts"][0])
            assert state["parts"][0] is not saved["state"][0]["parts"][0]
            assert (state["name"], state["x_scale"], resumed.state["calls"]) == ("sum", 2.0, 2)
            other[0].data.copy_(params[0])
        for some, stepped in ((params, optimizer), (other, resumed))[: 1 + (step > 1)]:
            set_grads(some, step)
            stepped.step()
    assert optimizer.state["calls"] == 4
    assert torch.equal(optimizer.state[params[0]]["master"], resumed.state[other[0]]["master"])
    there = Masters(Unusual, [torch.nn.Parameter(params[0].to("meta"))])
    there.load_state_dict(optimizer.state_dict())
    state = next(iter(s for p, s in there.state.items() if isinstance(p, torch.Tensor)))
    assert {state["step"].device.type, state["parts"][0].device.type} == {"meta"}


def test_a_state_of_the_other_optimizer_and_weights_written_since() -> None:
    plain = params_of(torch.float32)
    torchs = torch.optim.AdamW(plain, lr=0.1)
    set_grads(plain, 0)
    torchs.step()
    params = [torch.nn.Parameter(plain[0].detach().bfloat16())]
    ours = Masters(torch.optim.AdamW, params, lr=0.1)
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours.state[params[0]]["exp_avg"], torchs.state[plain[0]]["exp_avg"])
    set_grads(params, 1)
    ours.step()
    before = ours.state[params[0]]["master"].clone()
    with torch.no_grad():
        params[0][0] = 3.0
    set_grads(params, 2, 0.0)
    ours.param_groups[0]["lr"] = 0.0
    ours.step()
    master = ours.state[params[0]]["master"]
    assert master[0].eq(3).all()
    assert torch.equal(master[1:], before[1:])


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1


def test_the_other_optimizer_steps_once_for_all_groups_and_keeps_its_settings() -> None:
    params = params_of(torch.bfloat16, torch.float32, torch.bfloat16)
    optimizer = Masters(Counting, [{"params": params[:2]}])
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
