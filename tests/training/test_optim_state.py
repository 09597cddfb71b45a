"""State dicts of the optimizers: resuming, interchange with torch, what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import name
from optimizers import (
    KINDS,
    MIXES,
    Kind,
    assert_close,
    assert_same,
    clones,
    copies,
    kinds,
    master_of,
    mixed,
    parameters,
    set_grads,
    tensors,
    through_a_file,
    train,
    trained,
)

from mixprec.diagnostics.memory_report import _state_bytes
from mixprec.diagnostics.stats.monitor import _applied
from mixprec.optim import SGD, Adam, AdamW, Lion, Masters, Muon, fp32_state_dict
from mixprec.optim._base import Optimizer


@kinds
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run(kind: Kind) -> None:
    """The weights loaded before or after the optimizer's state; no dtype or bit changes."""
    for mix in MIXES:
        params = mixed()
        optimizer = kind(params, lr=0.01, **mix)
        saved = []
        for step in range(4):
            saved.append((clones(params), through_a_file(optimizer.state_dict())))
            train(optimizer, params, 1, step)
        for first, (weights, state) in enumerate(saved):
            other, before = mixed(), copy.deepcopy(state)
            resumed = kind(other, lr=0.5, **mix)
            for what in ("weights", "state") if first % 2 else ("state", "weights"):
                if what == "state":
                    resumed.load_state_dict(state)
                    continue
                with torch.no_grad():
                    for p, w in zip(other, weights, strict=True):
                        p.copy_(w)
            assert resumed.param_groups[0]["lr"] == 0.01
            train(resumed, other, 4 - first, first)
            assert_same(tensors(resumed, other), tensors(optimizer, params))
            for s, t in zip(state["state"].values(), before["state"].values(), strict=True):
                assert_same(list(s.values()), list(t.values()))  # it shares no memory


@kinds
def test_other_weights_after_the_state_are_where_training_goes_on(kind: Kind) -> None:
    """The master follows where they differ, and keeps all its bits where they do not."""
    for key, mode in (("master", "fp32"), ("remainder", "remainder16")):
        optimizer, params = trained(kind, torch.bfloat16, 3, [(4,)], lr=0.01, master_weights=mode)
        before = master_of(optimizer, params[0]).clone()
        assert not torch.equal(before, params[0].float())
        other = clones(params)
        resumed = kind(other, lr=0.01, master_weights=mode)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        with torch.no_grad():
            other[0][2] = 7.0
        want = other[0].detach().clone()
        resumed.param_groups[0]["lr"] = 0.0
        train(resumed, other, 1)
        assert torch.equal(other[0], want)
        now = master_of(resumed, other[0])
        assert torch.equal(now[[0, 1, 3]], before[[0, 1, 3]])
        assert abs(now[2] - 7.0) < 7.0 * 2.0**-8  # a remainder stays, less than half a unit
        assert key == "remainder" or now[2] == 7.0


SETTINGS = ({}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.0, "nesterov": False})


@kinds
@pytest.mark.parametrize("loop", ["plain", "fused", "foreach", "old"])
def test_interchange_with_torch(kind: Kind, loop: str) -> None:
    """A run that changes its optimizer every few steps ends where one of torch's alone ends."""
    for i, settings in enumerate(SETTINGS[: 4 if kind.ours is SGD else 3]):
        dtype = (torch.float32, torch.float64)[i % 2]
        expected, other = trained(kind.torch, dtype, 9, lr=0.01, **settings)
        option = {} if loop in ("plain", "old") else {loop: True}
        theirs, params = trained(kind.torch, dtype, 3, lr=0.01, **settings, **option)
        state = through_a_file(theirs.state_dict())
        if loop == "old":  # torch once had a plain step, None for no buffer, and fewer options
            for k in range(len(params)):
                if kind.ours is SGD:
                    state["state"].setdefault(k, {"momentum_buffer": None})
                else:
                    state["state"][k]["step"] = int(state["state"][k]["step"])
            for key in ("foreach", "fused", "differentiable", "capturable"):
                state["param_groups"][0].pop(key, None)
            if not settings.get("maximize"):
                del state["param_groups"][0]["maximize"]
        mine = kind.ours(params)
        mine.load_state_dict(state)
        assert mine.param_groups[0]["lr"] == 0.01
        train(mine, params, 3, first=3)
        theirs = kind.theirs(params, lr=0.5, **option)
        theirs.load_state_dict(through_a_file(mine.state_dict()))
        train(theirs, params, 3, first=6)
        assert_close(theirs, params, expected, other, 9)


def test_a_momentum_buffer_of_torch_has_begun_and_a_param_without_one_has_not() -> None:
    params, other = parameters(), parameters()
    settings = {"lr": 0.05, "momentum": 0.9, "dampening": 0.9}
    theirs, expected = torch.optim.SGD(params, **settings), torch.optim.SGD(other, **settings)
    for each, ps in ((theirs, params), (expected, other)):
        set_grads(ps[:3], 0)
        each.step()
    sgd = SGD(params)
    sgd.load_state_dict(theirs.state_dict())
    assert [len(sgd.state[p]) for p in params] == [2, 2, 2, 0, 0, 0]
    train(sgd, params, 3, first=1)
    train(expected, other, 3, first=1)
    assert_close(sgd, params, expected, other, 4)


@kinds
def test_16_bit_moments_of_torch_widen_and_wide_ones_are_not_rounded(kind: Kind) -> None:
    """And masters start from the params."""
    theirs, params = trained(kind.torch, torch.bfloat16, 1)
    mine = kind(params)
    mine.load_state_dict(theirs.state_dict())
    key = "momentum_buffer" if isinstance(mine, SGD) else "exp_avg"
    moments = [theirs.state[p][key].float() for p in params]
    assert_same([mine.state[p][key] for p in params], moments)
    mine.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(mine, params, 1)
    assert_same([mine.state[p]["master"] for p in params], [p.detach().float() for p in params])
    narrow = kind(params, state_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"load_state_dict: {key} must have dtype bfloat16, got"):
        narrow.load_state_dict(mine.state_dict())


@kinds
def test_a_state_that_is_no_params_is_saved_and_loaded_as_torch_does(kind: Kind) -> None:
    own = {"x": 1, "loss_scale": {"a_scale": 2.0, "t": torch.ones(2, dtype=torch.float64)}}
    loaded = []
    for make in (kind, kind.torch, partial(Masters, kind.theirs), Muon):
        optimizer, params = trained(make, torch.bfloat16, 1, [(4, 4), (3,)], lr=0.1)
        optimizer.state.update(own)
        states = [optimizer.state_dict()]
        if isinstance(optimizer, Optimizer):
            states.append(optimizer.fp32_state_dict())
            model = torch.nn.ParameterList(params)
            fp32_state_dict(model, optimizer)
            _applied(optimizer)
            assert sum(_state_bytes(optimizer).values()) > 16
        for state in states:
            other = make(clones(params), lr=0.1)
            other.load_state_dict(state)
            loaded.append({k: v for k, v in other.state.items() if k in own})
            assert len(other.state) == 4
        optimizer.zero_grad()
        optimizer.step()
    assert all(each == own for each in loaded)


def test_load_hooks_see_the_tensors() -> None:
    optimizer, params = trained(AdamW, torch.bfloat16, 1)
    seen = []

    def before(optimizer: AdamW, state: dict) -> dict:
        seen.append(state["state"][0]["master"].dtype)
        state["param_groups"][0]["lr"] = 0.25
        return state

    def after(optimizer: AdamW) -> None:
        seen.append(optimizer.state[params[0]]["master"].dtype)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32] * 4
    assert optimizer.param_groups[0]["lr"] == 0.25


THEIRS = "AdamW Adam SGD RAdam NAdam Adamax Adagrad RMSprop Rprop ASGD Adadelta Adafactor"
OTHERS = (AdamW, Adam, SGD, Lion, *(getattr(torch.optim, word) for word in THEIRS.split()))


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion], ids=name)
def test_a_checkpoint_of_another_optimizer_is_refused(kind: type) -> None:
    for other in OTHERS:
        theirs, _ = trained(other, shapes=[(3, 5), (129,)], lr=0.02)
        optimizer, params = trained(kind, shapes=[(3, 5), (129,)], lr=0.01)
        state = through_a_file(theirs.state_dict())
        if kind.__name__ == other.__name__:
            optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == 0.02
            continue
        before, groups = copies(optimizer, params), optimizer.state_dict()["param_groups"]
        message = f"^{kind.__name__}.load_state_dict: .*(another optimizer|AdamW decouples it)"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert_same(tensors(optimizer, params), before)
        assert optimizer.state_dict()["param_groups"] == groups
        train(optimizer, params, 1)


def entry(**values: Any) -> Callable[[dict], object]:
    return lambda state: state["state"][3].update(values)


def group(**values: Any) -> Callable[[dict], object]:
    return lambda state: state["param_groups"][0].update(values)


def damage(moment: str) -> list[tuple[Callable[[dict], object], str]]:
    ones = torch.ones(129)
    cases = [
        (lambda s: s.pop("state"), "keys state and param_groups"),
        (lambda s: s.pop("param_groups"), "keys state and param_groups"),
        (lambda s: s.update(param_groups=[{}]), "a list of param groups"),
        (lambda s: s.update(param_groups=[0]), "a list of param groups"),
        (lambda s: s.update(state={0: 5}), "a dict per param"),
        (lambda s: s.update(state=[]), "a dict per param"),
        (lambda s: s["param_groups"][0]["params"].pop(), "loaded state"),
        (lambda s: s["param_groups"].append(dict(s["param_groups"][0])), "loaded state"),
        (group(lr=torch.tensor([0.1, 0.1])), "lr must be"),
        *((entry(step=x), "step must be") for x in (-1.0, 0.5, math.nan, 2.0**24, ones[:2])),
        (entry(**{moment: torch.zeros(1)}), f"{moment} must be a tensor of shape"),
        (entry(**{moment: [0.0] * 129}), f"{moment} must be a tensor of shape"),
        (entry(**{moment: ones.double()}), f"{moment} must have dtype"),
        (entry(**{moment: ones.int()}), f"{moment} must have dtype"),
        (entry(master=ones), "holds a master"),
        (entry(remainder=ones.short()), "holds a remainder"),
        (entry(max_exp_avg_sq=ones), "another optimizer"),
        (entry(acc_delta=ones), "another optimizer"),
    ]
    if moment == "exp_avg":
        cases += [
            (lambda s: s["state"][3].pop("exp_avg_sq"), "must hold step, exp_avg, exp_avg_sq"),
            (group(amsgrad=True), "amsgrad must be False"),
        ]
    return cases


@pytest.mark.parametrize("kind", [KINDS["AdamW"], KINDS["nesterov"]], ids=str)
def test_a_damaged_state_is_refused_and_changes_nothing(kind: Kind) -> None:
    optimizer, params = trained(kind)
    before, settings = copies(optimizer, params), optimizer.state_dict()["param_groups"]
    for change, message in damage("momentum_buffer" if kind.ours is SGD else "exp_avg"):
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        with pytest.raises(ValueError, match=message) as caught:
            optimizer.load_state_dict(state)
        if message != "loaded state":  # which is torch's own
            assert str(caught.value).startswith(f"{kind}.load_state_dict: ")
        assert_same(tensors(optimizer, params), before)
        assert optimizer.state_dict()["param_groups"] == settings
    train(optimizer, params, 1)


R16: dict[str, Any] = {"master_weights": "remainder16"}
NONE: dict[str, Any] = {"master_weights": None}
STOCHASTIC: dict[str, Any] = {"stochastic_rounding": True}
PLACES: list[tuple[torch.dtype, dict, torch.dtype, dict, str]] = [
    # (param, options of the writer, param, options of the reader, message)
    (torch.bfloat16, {}, torch.bfloat16, R16, "holds a master, .* a bfloat16 param"),
    (torch.bfloat16, {}, torch.bfloat16, NONE, "a master, .*master_weights=None"),
    (torch.bfloat16, {}, torch.bfloat16, STOCHASTIC, "a master, .*stochastic_rounding=True"),
    (torch.float16, {}, torch.float16, NONE, "holds a master, .* a float16 param"),
    (torch.bfloat16, R16, torch.bfloat16, {}, "holds a remainder, .* bfloat16 param"),
    (torch.bfloat16, R16, torch.bfloat16, NONE, "a remainder"),
    # fp16, bf16 and fp32 runs continue one another through fp32_state_dict, not by a cast.
    (torch.bfloat16, R16, torch.float16, R16, "holds a remainder, .* a float16 param"),
    (torch.bfloat16, R16, torch.float32, R16, "holds a remainder, .* a float32 param"),
]


@kinds
def test_masters_and_remainders_without_a_place_are_refused(kind: Kind) -> None:
    for wrote_dtype, wrote, reads_dtype, reads, held in PLACES:
        optimizer, _ = trained(kind, wrote_dtype, 1, **wrote)
        other = parameters(reads_dtype)
        reader = kind(other, **reads)
        state = through_a_file(optimizer.state_dict())
        message = rf"load_state_dict: the state .*{held}.*delete the key"
        with pytest.raises(ValueError, match=message):
            reader.load_state_dict(state)
        assert not reader.state
        for s in state["state"].values():  # as it says
            s.pop("master", None)
            s.pop("remainder", None)
        reader.load_state_dict(state)
        train(reader, other, 1)


@kinds
def test_wrong_dtypes_of_masters_are_refused(kind: Kind) -> None:
    for key, mix, wrong in (
        ("remainder", R16, torch.int32),
        ("remainder", R16, torch.float32),
        ("master", {}, torch.bfloat16),
        ("master", {}, torch.float64),
    ):
        optimizer, params = trained(kind, torch.bfloat16, 1, **mix)
        before = copies(optimizer, params)
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][3][key] = state["state"][3][key].to(wrong)
        with pytest.raises(ValueError, match=rf"load_state_dict: {key} must have dtype .*, got"):
            optimizer.load_state_dict(state)
        assert_same(tensors(optimizer, params), before)
