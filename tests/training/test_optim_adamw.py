"""mixprec.optim.AdamW and Adam: torch's results, masters, clipping, skipping, saving, hooks."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import GRADS, WIDE, name, normal

import mixprec
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import Adam, AdamW

LOW = (torch.bfloat16, torch.float16)
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (0,), (), (129,), (4, 0, 3), (2, 3, 5))
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"betas": (0.0, 0.5), "weight_decay": 0.0, "maximize": True},
)
ADAMS = ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam))
Params = list[torch.nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Params:
    return [torch.nn.Parameter(normal(s, dtype, seed=i)) for i, s in enumerate(shapes)]


def set_grads(params: Params, seed: int, scale: float = 1.0) -> None:
    for i, p in enumerate(params):
        p.grad = normal(tuple(p.shape), p.dtype, seed=1000 * seed + i) * scale


def train(optimizer: torch.optim.Optimizer, params: Params, steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def tensors(optimizer: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Everything a step may write: params, then each one's state in a fixed order."""
    states = [optimizer.state[p] for p in params]
    return [p.detach() for p in params] + [s[key] for s in states for key in sorted(s)]


def copies(optimizer: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    return [t.clone() for t in tensors(optimizer, params)]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} differs"


def saved(state: dict) -> dict:
    """Through a file and back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# The update


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize(("kind", "theirs"), ADAMS, ids=["AdamW", "Adam"])
def test_same_as_torch(
    kind: type[AdamW], theirs: type[torch.optim.Optimizer], dtype: torch.dtype, settings: dict
) -> None:
    params, other = parameters(dtype), parameters(dtype)
    optimizer, expected = kind(params, **settings), theirs(other, **settings)
    assert optimizer.defaults["weight_decay"] == expected.defaults["weight_decay"]
    ulp = torch.finfo(dtype).eps
    for step in range(8):
        train(optimizer, params, 1, step)
        train(expected, other, 1, step)
        for p, o in zip(params, other, strict=True):
            # In a step each of the two rounds the param twice, half a unit each, and the update,
            # about lr, a dozen times.
            rtol, atol = 2 * (step + 1) * ulp, 12 * (step + 1) * ulp * optimizer.defaults["lr"]
            torch.testing.assert_close(p, o, rtol=rtol, atol=atol)
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    optimizer.state[p][key], expected.state[o][key], rtol=16 * ulp, atol=4 * ulp
                )
            assert optimizer.state[p]["step"].item() == step + 1


@pytest.mark.parametrize("settings", [*SETTINGS, {"max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("master_weights", ["auto", None])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
@pytest.mark.parametrize("kind", [AdamW, Adam], ids=name)
def test_kernel_and_reference_agree_bit_for_bit(
    kind: type[AdamW], dtype: torch.dtype, master_weights: str | None, settings: dict
) -> None:
    runs = []
    for backend in ("cpp", "reference"):
        with mixprec.use_backend(backend):
            params = parameters(dtype)
            optimizer = kind(params, master_weights=master_weights, **settings)
            scaler = GradScaler(init_scale=2.0**6)
            scaler.scale(torch.zeros(()))
            for step in range(4):
                set_grads(params, step, 2.0**6 if step != 2 else math.inf)
                scaler.step(optimizer)
                scaler.update()
                train(optimizer, params, 1, step)  # and a step without a scaler
            runs.append(tensors(optimizer, params))
            assert scaler.skipped.item() == 1
    if "max_grad_norm" in settings:  # sums of another order: the clip may differ by an ULP
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=8 * torch.finfo(a.dtype).eps, atol=1e-9)
    else:
        assert_same(*runs)


@pytest.mark.parametrize("mode", ["auto", "fp32"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_master_is_an_fp32_run_and_the_param_its_rounding(dtype: torch.dtype, mode: str) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, lr=1e-4, master_weights=mode)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    expected = AdamW(wide, lr=1e-4)
    for step in range(20):
        train(optimizer, params, 1, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        expected.step()
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master"], w)
        assert torch.equal(p, w.to(dtype))
        assert "master" not in expected.state[w]


def test_groups_of_mixed_params() -> None:
    """fp32 norms between bf16 weights, two groups with settings of their own, as torch does it."""
    wide = parameters(shapes=[(5,)] * 6)
    params = [p if i % 2 else torch.nn.Parameter(p.detach().bfloat16()) for i, p in enumerate(wide)]
    optimizer = AdamW(
        [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "weight_decay": 0.7}]
    )
    other = [torch.nn.Parameter(p.detach().float()) for p in params]
    expected = torch.optim.AdamW(
        [{"params": other[:3], "lr": 0.5}, {"params": other[3:], "weight_decay": 0.7}]
    )
    for step in range(4):
        set_grads(params, step)
        for p, o in zip(params, other, strict=True):
            o.grad = p.grad.float()
        optimizer.step()
        expected.step()
    for i, (p, o) in enumerate(zip(params, other, strict=True)):
        truth = p if i % 2 else optimizer.state[p]["master"]
        torch.testing.assert_close(truth.detach(), o.detach(), rtol=1e-6, atol=1e-6)
        assert ("master" in optimizer.state[p]) == (i % 2 == 0)


# Clipping and skipping


@pytest.mark.parametrize("grad_scale", [None, 2.0**9])
@pytest.mark.parametrize("max_norm", [0.3, 1e4])
def test_clipping_is_over_all_groups_and_after_unscaling(
    max_norm: float, grad_scale: float | None
) -> None:
    params, other = parameters(), parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
    optimizer = AdamW(groups, max_grad_norm=max_norm)
    expected = torch.optim.AdamW([{"params": other[:2]}, {"params": other[2:], "lr": 0.01}])
    scaler = GradScaler(init_scale=grad_scale or 1.0)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        set_grads(params, step, (grad_scale or 1.0) * (step + 1))
        grads = [p.grad.clone() for p in params]
        if grad_scale is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
        set_grads(other, step, step + 1)
        torch.nn.utils.clip_grad_norm_(other, max_norm)
        expected.step()
        for p, o in zip(params, other, strict=True):
            torch.testing.assert_close(p, o, rtol=1e-6, atol=1e-6)
            mine, theirs = optimizer.state[p]["exp_avg_sq"], expected.state[o]["exp_avg_sq"]
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-12)


NO_SCALER = [
    *((d, None, 1.0, True) for d in GRADS),
    *((d, None, None, True) for d in LOW),
    *((d, "auto", None, True) for d in LOW),
    *((d, None, None, False) for d in (torch.float32, torch.float64)),
]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("dtype", "masters", "max_norm", "skips"), NO_SCALER, ids=str)
def test_without_a_scaler(
    dtype: torch.dtype, masters: str | None, max_norm: float | None, skips: bool, bad: float
) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, master_weights=masters, max_grad_norm=max_norm)
    train(optimizer, params, 2)
    before = copies(optimizer, params)
    set_grads(params, 7)
    params[3].grad[-1] = bad
    optimizer.step()
    if skips:
        assert_same(tensors(optimizer, params), before)
        assert optimizer.skipped.item() == 1
        train(optimizer, params, 1)
        assert optimizer.skipped.item() == 1
        assert optimizer.state[params[0]]["step"].item() == 3
        assert all(t.isfinite().all() for t in tensors(optimizer, params))
    else:  # as torch.optim: nothing has read the gradients before
        assert not params[3].isfinite().all()
        assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_works_with_torchs_scaler(dtype: torch.dtype) -> None:
    runs = []
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler()):
        params = parameters(dtype)
        optimizer = AdamW(params, max_grad_norm=1.0)
        for step in range(6):
            scaler.scale(torch.zeros(()))
            set_grads(params, step, scaler.get_scale() if dtype != torch.float16 else 1.0)
            if step == 2:
                params[0].grad[0, 0] = math.inf
            if step == 4 and dtype != torch.float16:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert optimizer.state[params[0]]["step"].item() == 5
        runs.append(tensors(optimizer, params))
    assert_same(*runs)


@pytest.mark.parametrize("flag", [[2.0], 2.0, 0.5])
def test_any_found_inf_that_is_not_zero_skips(flag: Any) -> None:
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    before = copies(optimizer, params)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(flag), None
    optimizer.step()
    assert_same(tensors(optimizer, params), before)
    assert optimizer.skipped.item() == 1


# Who else writes the params


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_master_follows_only_where_the_param_was_written(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, lr=0.0, weight_decay=0.0)  # steps that move nothing
    train(optimizer, params, 1)
    state = optimizer.state[params[0]]
    with torch.no_grad():  # a master with bits that the param does not have
        state["master"] += state["master"].abs() * torch.finfo(dtype).eps / 8
        want = state["master"].clone()
        assert not torch.equal(want, params[0].float())
        assert torch.equal(want.to(dtype), params[0])
        params[0][1, 2] = 8.0
    want[1, 2] = 8.0
    train(optimizer, params, 1)
    assert torch.equal(state["master"], want)
    assert params[0][1, 2] == 8.0
    params[0].data[0, 0] = 5.0  # not seen: the next step writes the master's rounding over it
    train(optimizer, params, 1)
    assert torch.equal(state["master"], want)
    assert torch.equal(params[0], want.to(dtype))


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_masters_are_made_at_the_first_step(dtype: torch.dtype) -> None:
    """Weights loaded after the optimizer was made are what training starts from."""
    params, weights = parameters(dtype), parameters(dtype)
    optimizer = AdamW(params, lr=0.0)
    assert not optimizer.state
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w * 2)
    train(optimizer, params, 1)
    for p, w in zip(params, weights, strict=True):
        assert torch.equal(optimizer.state[p]["master"], w.float() * 2)


# Saving


@pytest.mark.parametrize("master_weights", ["auto", None])
@pytest.mark.parametrize("dtype", GRADS, ids=name)
def test_state_dict_keeps_true_dtypes_and_all_bits(
    dtype: torch.dtype, master_weights: str | None
) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, master_weights=master_weights)
    train(optimizer, params)
    state = saved(optimizer.state_dict())
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = AdamW(other, master_weights=master_weights)
    resumed.load_state_dict(state)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    keys = {"step", "exp_avg", "exp_avg_sq"}
    keys |= {"master"} if dtype in LOW and master_weights else set()
    for s in resumed.state.values():
        assert set(s) == keys
        assert {k: t.dtype for k, t in s.items() if k != "step"} == dict.fromkeys(
            keys - {"step"}, real
        )
        assert s["step"].dtype == torch.float32
        assert s["step"].shape == ()
    assert_same(tensors(resumed, other), tensors(optimizer, params))
    train(optimizer, params, first=5)
    train(resumed, other, first=5)
    assert_same(tensors(resumed, other), tensors(optimizer, params))


def test_loading_shares_no_memory() -> None:
    params, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, resumed = AdamW(params), AdamW(other)
    train(optimizer, params)
    resumed.load_state_dict(optimizer.state_dict())
    before = copies(optimizer, params)
    train(resumed, other)
    assert_same(tensors(optimizer, params), before)


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_loading_only_the_optimizers_state_leaves_the_weights(dtype: torch.dtype) -> None:
    """The masters of other weights are not what training goes on from."""
    params, other = parameters(dtype), [torch.nn.Parameter(-p.detach()) for p in parameters(dtype)]
    optimizer, used = AdamW(params), AdamW(other)
    train(optimizer, params)
    train(used, other)
    before = [p.detach().clone() for p in other]
    used.load_state_dict(optimizer.state_dict())
    used.param_groups[0].update(lr=0.0)
    train(used, other, 1)
    assert_same([p.detach() for p in other], before)


@pytest.mark.parametrize("loop", ["plain", "fused", "foreach", "old"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize(("kind", "torchs"), ADAMS, ids=["AdamW", "Adam"])
def test_interchange_with_torch(
    kind: type[AdamW], torchs: type[torch.optim.Optimizer], dtype: torch.dtype, loop: str
) -> None:
    """A run that changes its optimizer every few steps ends where one of torch's alone ends."""
    expected_params, params = parameters(dtype), parameters(dtype)
    expected = torchs(expected_params, lr=0.01, weight_decay=0.1)
    train(expected, expected_params, 9)
    option = {} if loop in ("plain", "old") else {loop: True}
    theirs = torchs(params, lr=0.01, weight_decay=0.1, **option)
    train(theirs, params, 3)
    state = saved(theirs.state_dict())
    if loop == "old":  # torch once kept a plain number, and had fewer options
        for s in state["state"].values():
            s["step"] = int(s["step"])
        for key in state["param_groups"][0].keys() - {"params", "lr", "betas", "eps", "amsgrad"}:
            if key != "weight_decay":
                del state["param_groups"][0][key]
    mine = kind(params)
    mine.load_state_dict(state)
    assert mine.param_groups[0]["lr"] == 0.01
    train(mine, params, 3, first=3)
    theirs = torchs(params, **option)
    theirs.load_state_dict(saved(mine.state_dict()))
    train(theirs, params, 3, first=6)
    ulp = torch.finfo(dtype).eps
    for p, e in zip(params, expected_params, strict=True):
        torch.testing.assert_close(p, e, rtol=8 * ulp, atol=2 * ulp)


def test_a_state_of_mine_without_torchs_options_loads_into_torch() -> None:
    params, other = parameters(), parameters()
    optimizer, theirs = AdamW(params, maximize=True), torch.optim.AdamW(other)
    train(optimizer, params, 2)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["maximize"] is True
    assert theirs.param_groups[0]["amsgrad"] is False
    train(theirs, other, 1)


def test_16_bit_moments_of_torch_widen_and_masters_start_from_the_param() -> None:
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params)
    train(theirs, params)
    mine = AdamW(params, lr=0.0, weight_decay=0.0)
    mine.load_state_dict(theirs.state_dict())
    for p in params:
        assert mine.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(mine.state[p]["exp_avg"], theirs.state[p]["exp_avg"].float())
    mine.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(mine, params, 1)
    for p in params:
        assert torch.equal(mine.state[p]["master"], p.float())


def _a_master_without_a_place(state: dict) -> None:
    state["state"][0]["master"] = state["state"][0]["exp_avg"].clone()


def _another_shape(state: dict) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(1)


def _no_moment(state: dict) -> None:
    del state["state"][3]["exp_avg_sq"]


def _amsgrad_state(state: dict) -> None:
    state["state"][3]["max_exp_avg_sq"] = torch.zeros(129)


def _amsgrad(state: dict) -> None:
    state["param_groups"][0]["amsgrad"] = True


def _wide_moment(state: dict) -> None:
    state["state"][3]["exp_avg"] = torch.zeros(129, dtype=torch.float64)


def _integers(state: dict) -> None:
    state["state"][3]["exp_avg"] = torch.zeros(129, dtype=torch.int32)


def _fraction(state: dict) -> None:
    state["state"][3]["step"] = torch.tensor(1.5)


def _nan_step(state: dict) -> None:
    state["state"][3]["step"] = math.nan


def _negative_step(state: dict) -> None:
    state["state"][3]["step"] = -1


def _two_lrs(state: dict) -> None:
    state["param_groups"][0]["lr"] = torch.tensor([0.1, 0.1])


def _not_a_tensor(state: dict) -> None:
    state["state"][3]["exp_avg"] = [0.0] * 129


def _fewer_params(state: dict) -> None:
    state["param_groups"][0]["params"].pop()


def _more_groups(state: dict) -> None:
    state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))


@pytest.mark.parametrize(
    "damage",
    [
        _a_master_without_a_place,
        _another_shape,
        _no_moment,
        _amsgrad_state,
        _amsgrad,
        _wide_moment,
        _integers,
        _fraction,
        _nan_step,
        _negative_step,
        _two_lrs,
        _not_a_tensor,
        _fewer_params,
        _more_groups,
    ],
    ids=name,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: Callable) -> None:
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, 2)
    before, groups = (
        copies(optimizer, params),
        copy.deepcopy(optimizer.state_dict()["param_groups"]),
    )
    state = copy.deepcopy(optimizer.state_dict())
    damage(state)
    with pytest.raises(ValueError, match=r"loaded state|AdamW.load_state_dict: "):
        optimizer.load_state_dict(state)
    assert_same(tensors(optimizer, params), before)
    assert optimizer.state_dict()["param_groups"] == groups
    train(optimizer, params, 1)


def test_a_master_of_16_bits_or_for_no_masters_is_refused() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="a master, for which a bfloat16 param has no place with"):
        AdamW(params, master_weights=None).load_state_dict(state)
    state["state"][0]["master"] = state["state"][0]["master"].bfloat16()
    with pytest.raises(ValueError, match="master must have dtype float32, got"):
        AdamW(params).load_state_dict(state)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_dtypes_are_checked_again_at_the_step(key: str) -> None:
    """Some restore paths write optimizer.state themselves, cast to the param's dtype."""
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    state = optimizer.state[params[3]]
    state[key] = state[key].bfloat16()
    before = copies(optimizer, params)
    with pytest.raises(ValueError, match=rf"{key}s\[3\] must have dtype float32"):
        train(optimizer, params, 1)
    assert_same(tensors(optimizer, params), before)


def test_load_hooks_see_true_tensors() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    seen = []

    def before(optimizer: AdamW, state: dict) -> dict:
        seen.append(state["state"][0]["master"].dtype)
        state["param_groups"][0]["lr"] = 0.25
        return state

    def after(optimizer: AdamW) -> None:
        seen.append(optimizer.state[params[0]]["master"].dtype)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32] * 4
    assert optimizer.param_groups[0]["lr"] == 0.25


# What any torch optimizer can do


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_copies_and_pickles(dtype: torch.dtype, clone: Callable) -> None:
    params = parameters(dtype)
    optimizer = AdamW(params, master_weights="auto", max_grad_norm=0.7)
    train(optimizer, params, 2)
    set_grads(params, 3, math.nan)
    optimizer.step()
    other = clone(optimizer)
    theirs = other.param_groups[0]["params"]
    assert (other.master_weights, other.max_grad_norm, other.skipped.item()) == ("auto", 0.7, 1)
    assert_same(tensors(other, theirs), tensors(optimizer, params))
    train(optimizer, params, 2, first=4)
    train(other, theirs, 2, first=4)
    assert_same(tensors(other, theirs), tensors(optimizer, params))
    assert clone(AdamW(params, master_weights=None)).master_weights is None


def test_closure() -> None:
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamW([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[0] == 4.0
    assert losses[-1] < 1.0


def test_schedulers_and_hooks() -> None:
    params, other = parameters(), parameters()
    optimizer, expected = AdamW(params, lr=0.1), torch.optim.AdamW(other, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10)
        for o in (optimizer, expected)
    ]
    for step in range(8):
        train(optimizer, params, 1, step)
        train(expected, other, 1, step)
        for scheduler in schedulers:
            scheduler.step()
    assert calls == ["pre", "post"] * 8
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"] != 0.1
    assert optimizer.param_groups[0]["betas"] != (0.9, 0.999)  # cycled too
    for p, o in zip(params, other, strict=True):
        torch.testing.assert_close(p, o, rtol=1e-6, atol=1e-6)


def test_frozen_params_and_groups_added_later() -> None:
    params = parameters(torch.bfloat16, shapes=[(5,)] * 4)
    optimizer = AdamW(params[:2], lr=0.1)
    optimizer.step()  # no gradients at all
    assert not optimizer.state
    set_grads(params[:1], 0)
    optimizer.step()
    assert set(optimizer.state) == {params[0]}
    optimizer.add_param_group({"params": params[2], "lr": 0.5})
    frozen = params[1].detach().clone()
    for step in range(3):
        set_grads([params[0], params[2]], step)
        optimizer.step()
    assert torch.equal(params[1], frozen)
    assert [int(optimizer.state[p]["step"]) for p in (params[0], params[2])] == [4, 3]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


def test_named_parameters() -> None:
    params = parameters()
    optimizer = AdamW([(f"p{i}", p) for i, p in enumerate(params)])
    train(optimizer, params, 1)
    assert optimizer.param_groups[0]["param_names"] == [f"p{i}" for i in range(len(params))]
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, 1)


def test_strided_params_and_gradients() -> None:
    """A transposed param, a gradient with strides of 0: as their contiguous copies."""
    strided = torch.nn.Parameter(normal((4, 6), torch.bfloat16).t())
    dense = torch.nn.Parameter(strided.detach().contiguous())
    optimizer, expected = AdamW([strided]), AdamW([dense])
    for step in range(3):
        grad = normal((6, 1), torch.bfloat16, seed=step).expand(6, 4)
        strided.grad, dense.grad = grad, grad.contiguous()
        optimizer.step()
        expected.step()
    assert torch.equal(strided, dense)
    assert torch.equal(optimizer.state[strided]["master"], expected.state[dense]["master"])


# Errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, "lr must be a finite number, 0 or more, got -1.0"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one fp32 or fp64 element, got"),
        ({"lr": torch.tensor(1)}, "lr must be a number or a tensor of one fp32 or fp64 element"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be a number in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
        ({"betas": (0.9,)}, "betas must be"),
        ({"amsgrad": True}, "amsgrad"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [AdamW, Adam], ids=name)
def test_bad_settings(kind: type[AdamW], settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: {words}"):
        kind(parameters(), **settings)
    if "amsgrad" not in settings:
        optimizer = kind(parameters())
        with pytest.raises(ValueError, match=f"{kind.__name__}: {words}"):
            optimizer.add_param_group({"params": parameters(), **settings})
        assert len(optimizer.param_groups) == 1


def test_sparse_gradients_and_params_of_other_dtypes_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    dense = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([dense, *table.parameters()])
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(ValueError, match=r"AdamW: gradients must be dense, .*sparse=False"):
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
        with pytest.raises(ValueError, match="AdamW: params must be fp32, bf16, fp16 or fp64"):
            AdamW([p])
