"""State dicts of the optimizers: resuming, copies, interchange with torch."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from cases import name
from optimizers import (
    LOW,
    MOMENTS,
    Kind,
    Run,
    assert_close,
    assert_same,
    clones,
    kinds,
    mixed,
    parameters,
    same_kinds,
    set_grads,
    through_a_file,
)

from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, AdamW, Masters, fp32_state_dict

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda run: pickle.loads(pickle.dumps(run))}
WAYS = (*COPIES, "weights first", "state first", "through FP32", "through BF16")


def resumed(run: Run, kind: Kind, way: str, options: dict[str, Any]) -> Run:
    """Another run that has to go on as this one."""
    if way in COPIES:
        other = COPIES[way](run)
        assert other.optimizer.param_groups[0]["params"][0] is other.params[0]
        assert repr(other.optimizer) == repr(run.optimizer)
        return other
    state = run.optimizer.state_dict()  # whose tensors the run goes on to write
    if way.startswith("through"):
        state = through_a_file(run.optimizer.fp32_state_dict())
        narrow = way == "through BF16" or options["state_dtype"] == torch.bfloat16
        for s in state["state"].values():
            for key in MOMENTS & s.keys():
                assert s[key].dtype in (torch.float32, torch.float64)
                low = s[key].bfloat16()  # without loss, of moments in 8 or 16 bits
                if narrow and s[key].dtype == torch.float32 and torch.equal(low.float(), s[key]):
                    s[key] = low
    other = Run(kind, mixed() if way == "state first" else clones(run.params), **options)
    other.optimizer.load_state_dict(state)
    if way == "state first":
        with torch.no_grad():
            for p, w in zip(other.params, run.params, strict=True):
                p.copy_(w)
    other.steps = run.steps
    return other


@kinds
@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run(kind: Kind, way: str) -> None:
    """No dtype or bit changes, and the two share no memory. Every mix in half of the ways."""
    for mix in kind.mixes[WAYS.index(way) % 2 :: 2]:
        run = Run(kind, mixed(), lr=0.01, max_grad_value=2.0, **mix)
        others = []
        for step in range(3):
            others.append(resumed(run, kind, way, {**mix, "max_grad_value": 2.0}))
            assert others[-1].optimizer.param_groups[0]["lr"] == 0.01
            run.train()
            if step == 0:
                set_grads(run.params, 0, math.inf)
                run.optimizer.step()  # which is skipped
        for first, other in enumerate(others):
            assert_same(other.train(3 - first), run)


@kinds
def test_remainders_of_8_and_16_bits_can_be_exchanged(kind: Kind) -> None:
    """From 8 to 16 bits exactly, from 16 to 8 to nearest; params stay."""
    for wrote, reads in (("remainder8", "remainder16"), ("remainder16", "remainder8")):
        run = Run(kind, parameters(torch.bfloat16), lr=0.01, master_weights=wrote).train(3)
        other = Run(kind, clones(run.params), master_weights=reads)
        other.optimizer.load_state_dict(through_a_file(run.optimizer.state_dict()))
        assert_same(other.params, run.params)
        got, want = (torch.cat([m.flatten() for m in r.masters()]) for r in (other, run))
        far = (got.view(torch.int32) - want.view(torch.int32)).abs().max()
        assert far <= (0 if wrote == "remainder8" else 255)  # 127 / 256 stands for a half
        assert far.gt(0) == (wrote == "remainder16")
        other.train()


SETTINGS = ({}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.0, "nesterov": False})


@same_kinds
@pytest.mark.parametrize("loop", ["plain", "fused", "foreach", "old"])
def test_interchange_with_torch(kind: Kind, loop: str) -> None:
    """A run that changes its optimizer every few steps ends where one of torch's alone ends."""
    for i, settings in enumerate(SETTINGS[: 4 if kind.ours is SGD else 3]):
        dtype = (torch.float32, torch.float64)[i % 2]
        expected = Run(kind.torch, dtype, lr=0.01, **settings).train(9)
        option = {} if loop in ("plain", "old") else {loop: True}
        run = Run(kind.torch, dtype, lr=0.01, **settings, **option).train(3)
        state = through_a_file(run.optimizer.state_dict())
        if loop == "old":  # torch once had a plain step, None for no buffer, and fewer options
            for k in range(len(run.params)):
                if kind.ours is SGD:
                    state["state"].setdefault(k, {"momentum_buffer": None})
                else:
                    state["state"][k]["step"] = int(state["state"][k]["step"])
            for key in ("foreach", "fused", "differentiable", "capturable"):
                state["param_groups"][0].pop(key, None)
            if not settings.get("maximize"):
                del state["param_groups"][0]["maximize"]
        run.optimizer = kind.ours(run.params)
        run.optimizer.load_state_dict(state)
        assert run.optimizer.param_groups[0]["lr"] == 0.01
        state = through_a_file(run.train(3).optimizer.state_dict())
        run.optimizer = kind.theirs(run.params, lr=0.5, **option)
        run.optimizer.load_state_dict(state)
        assert_close(run.train(3), expected)


@same_kinds
def test_16_bit_moments_of_torch_widen_and_wide_ones_are_not_rounded(kind: Kind) -> None:
    """And masters start from the params."""
    theirs = Run(kind.torch, torch.bfloat16).train()
    run = Run(kind, theirs.params)
    run.optimizer.load_state_dict(theirs.optimizer.state_dict())
    key = "momentum_buffer" if kind.ours is SGD else "exp_avg"
    assert_same([s[key] for s in run.states], [s[key].float() for s in theirs.states])
    run.set(lr=0.0, weight_decay=0.0)
    run.train()
    assert_same([s["master"] for s in run.states], [p.detach().float() for p in run.params])
    narrow = kind(run.params, state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"load_state_dict: {key} must have dtype bfloat16, got"):
        narrow.load_state_dict(run.optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@same_kinds
def test_a_moment_in_8_bits_loads_into_others(kind: Kind, dtype: torch.dtype) -> None:
    """All its values are BF16 numbers."""
    run = Run(kind, parameters(shapes=[(65, 70)]), state_dtype="int8").train(2)
    wide = run.optimizer.fp32_state_dict()["state"][0]
    other = Run(kind, clones(run.params), state_dtype=dtype)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    (state,) = other.states
    assert state.keys() == wide.keys()
    for key in MOMENTS & state.keys():
        assert state[key].dtype == dtype
        assert torch.equal(state[key].float(), wide[key])


@kinds
def test_a_state_that_is_no_params_is_saved_and_loaded_as_torch_does(kind: Kind) -> None:
    own = {"x": 1, "loss_scale": {"a_scale": 2.0, "t": torch.ones(2, dtype=torch.float64)}}
    for make in (kind, kind.torch, partial(Masters, kind.theirs)):
        run = Run(make, parameters(torch.bfloat16, [(4, 4), (3, 5)]), lr=0.1).train()
        optimizer = run.optimizer
        optimizer.state.update(own)
        states = [optimizer.state_dict()]
        if hasattr(optimizer, "fp32_state_dict"):
            states.append(optimizer.fp32_state_dict())
            fp32_state_dict(torch.nn.ParameterList(run.params), optimizer)
        for state in states:
            other = make(clones(run.params), lr=0.1)
            other.load_state_dict(state)
            assert {k: v for k, v in other.state.items() if k in own} == own
            assert len(other.state) == 4
        run.train()


def test_load_hooks_see_the_tensors() -> None:
    run = Run(AdamW, torch.bfloat16).train()
    seen = []

    def before(optimizer: AdamW, state: dict) -> dict:
        seen.append(state["state"][0]["master"].dtype)
        state["param_groups"][0]["lr"] = 0.25
        return state

    run.optimizer.register_load_state_dict_pre_hook(before)
    run.optimizer.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state[run.params[0]]["master"].dtype)
    )
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert seen == [torch.float32] * 2
    assert run.optimizer.param_groups[0]["lr"] == 0.25


# Gradients that come and go, and what others change between steps


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
