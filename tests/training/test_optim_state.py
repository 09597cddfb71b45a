"""The state of all optimizers: resuming, fp32_state_dict, copies, who has gradients when."""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import name, normal
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

from mixprec.ops import join_master
from mixprec.optim import SGD, Adam, AdamW, fp32_state_dict

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "Adam": lambda params, **kw: Adam(params, **{"weight_decay": 0.1, **kw}),
    "SGD": lambda params, **kw: SGD(params, **{"momentum": 0.9, "dampening": 0.1, **kw}),
}
TORCHS = {
    "AdamW": torch.optim.AdamW,
    "Adam": lambda params, **kw: torch.optim.Adam(params, weight_decay=0.1, **kw),
    "SGD": lambda params, **kw: torch.optim.SGD(params, momentum=0.9, dampening=0.1, **kw),
}
MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"master_weights": "remainder16"},
    {"master_weights": None},
    {"state_dtype": torch.bfloat16, "master_weights": "remainder16"},
    {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
)
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
mixes = pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(name, mix.values())))
both = pytest.mark.parametrize(
    ("kind", "theirs"), list(zip(KINDS.values(), TORCHS.values(), strict=True)), ids=KINDS
)


def mixed() -> list[torch.nn.Parameter]:
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return [
        torch.nn.Parameter(normal(s, d, seed=i))
        for i, (s, d) in enumerate(zip(((3, 5), (7,), (2, 2), (0,), (9,)), dtypes, strict=True))
    ]


def clones(params: list) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def truth(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """The FP32 number that is trained."""
    state = optimizer.state[p]
    if "remainder" in state:
        return join_master(p.detach(), state["remainder"])
    return state.get("master", p.detach()).float()


# Resuming


@kinds
@mixes
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run(
    kind: Callable, mix: dict, order: str
) -> None:
    params = mixed()
    optimizer = kind(params, lr=0.01, **mix)
    weights, states = [], []
    for step in range(4):
        weights.append(clones(params))
        states.append(saved(optimizer.state_dict()))
        train(optimizer, params, 1, step)
    for first in range(4):
        other = mixed()
        resumed = kind(other, lr=0.5, **mix)
        if order == "optimizer first":
            resumed.load_state_dict(states[first])
        with torch.no_grad():
            for p, w in zip(other, weights[first], strict=True):
                p.copy_(w)
        if order == "model first":
            resumed.load_state_dict(states[first])
        train(resumed, other, 4 - first, first)
        assert_same(tensors(resumed, other), tensors(optimizer, params))


@kinds
@mixes
def test_loading_leaves_the_loaded_state_alone(kind: Callable, mix: dict) -> None:
    params, other = mixed(), mixed()
    optimizer, resumed = kind(params, lr=0.01, **mix), kind(other, lr=0.01, **mix)
    train(optimizer, params, 2)
    state = optimizer.state_dict()
    before = [t.clone() for s in state["state"].values() for t in s.values()]
    resumed.load_state_dict(state)
    train(resumed, other, 2)
    assert_same([t for s in state["state"].values() for t in s.values()], before)


OTHERS = {
    **{f"mixprec {k.__name__}": k for k in (AdamW, Adam, SGD)},
    **{
        f"torch {k.__name__}": k
        for k in (
            *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RAdam),
            *(torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.RMSprop),
            *(torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adafactor),
        )
    },
}


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD], ids=name)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_optimizer_is_refused(kind: type, other: type) -> None:
    shapes = [(3, 5), (129,)]
    params = parameters(shapes=shapes)
    optimizer = kind(params, lr=0.01)
    train(optimizer, params, 2)
    theirs = other(parameters(shapes=shapes), lr=0.02)
    train(theirs, theirs.param_groups[0]["params"], 2)
    state = saved(theirs.state_dict())
    if kind.__name__ == other.__name__:
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.02
        return
    before, groups = copies(optimizer, params), optimizer.state_dict()["param_groups"]
    words = f"^{kind.__name__}.load_state_dict: .*(another optimizer|AdamW decouples it)"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)
    assert_same(tensors(optimizer, params), before)
    assert optimizer.state_dict()["param_groups"] == groups
    train(optimizer, params, 1)


def _without(*keys: str) -> Callable:
    def damage(state: dict) -> dict:
        return {k: v for k, v in state.items() if k not in keys}

    damage.__name__ = f"without {' and '.join(keys)}"
    return damage


def _empty_group(state: dict) -> dict:
    return {**state, "param_groups": [{}]}


def _groups_of_numbers(state: dict) -> dict:
    return {**state, "param_groups": [0]}


def _state_of_numbers(state: dict) -> dict:
    return {**state, "state": {0: 5}}


def _state_in_a_list(state: dict) -> dict:
    return {**state, "state": []}


DAMAGED = (
    *(_without("state"), _without("param_groups"), _without("state", "param_groups")),
    *(_empty_group, _groups_of_numbers, _state_of_numbers, _state_in_a_list),
)


@pytest.mark.parametrize("damage", DAMAGED, ids=name)
def test_a_damaged_state_dict_is_refused(damage: Callable) -> None:
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    before = copies(optimizer, params)
    state = damage(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"^AdamW.load_state_dict: "):
        optimizer.load_state_dict(state)
    assert_same(tensors(optimizer, params), before)
    train(optimizer, params, 1)


PLACES = [
    # (param, options of the writer, options of the reader, words)
    (torch.bfloat16, {}, {"master_weights": "remainder16"}, "holds a master, .* a bfloat16 param"),
    (torch.bfloat16, {}, {"master_weights": None}, "a master, .*master_weights=None"),
    (torch.bfloat16, {}, {"stochastic_rounding": True}, "a master, .*stochastic_rounding=True"),
    (torch.float16, {}, {"master_weights": None}, "holds a master, .* a float16 param"),
    (torch.bfloat16, {"master_weights": "remainder16"}, {}, "holds a remainder, .* bfloat16 param"),
    (torch.bfloat16, {"master_weights": "remainder16"}, {"master_weights": None}, "a remainder"),
]


@kinds
@pytest.mark.parametrize(("dtype", "wrote", "reads", "words"), PLACES, ids=str)
def test_masters_and_remainders_without_a_place_are_refused(
    kind: Callable, dtype: torch.dtype, wrote: dict, reads: dict, words: str
) -> None:
    params = parameters(dtype)
    optimizer = kind(params, **wrote)
    train(optimizer, params, 1)
    other = parameters(dtype)
    reader = kind(other, **reads)
    state = saved(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"load_state_dict: the state .*{words}.*delete the key"):
        reader.load_state_dict(state)
    assert not reader.state
    for s in state["state"].values():  # as it says
        s.pop("master", None)
        s.pop("remainder", None)
    reader.load_state_dict(state)
    train(reader, other, 1)


@kinds
def test_a_checkpoint_of_params_of_another_dtype_is_refused(kind: Callable) -> None:
    """fp16, bf16 and fp32 runs continue one another through fp32_state_dict, not by a cast."""
    params = parameters(torch.bfloat16)
    optimizer = kind(params, master_weights="remainder16")
    train(optimizer, params, 1)
    for dtype in (torch.float16, torch.float32, torch.float64):
        reader = kind(parameters(dtype), master_weights="remainder16")
        with pytest.raises(ValueError, match="load_state_dict: the state holds a remainder, for w"):
            reader.load_state_dict(optimizer.state_dict())


@kinds
def test_wrong_dtypes_are_refused(kind: Callable) -> None:
    for mix, key, wrong in (
        ({"master_weights": "remainder16"}, "remainder", torch.int32),
        ({"master_weights": "remainder16"}, "remainder", torch.float32),
        ({}, "master", torch.bfloat16),
        ({}, "master", torch.float64),
    ):
        params = parameters(torch.bfloat16)
        optimizer = kind(params, **mix)
        train(optimizer, params, 1)
        before = copies(optimizer, params)
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][3][key] = state["state"][3][key].to(wrong)
        with pytest.raises(ValueError, match=rf"load_state_dict: {key} must have dtype .*, got"):
            optimizer.load_state_dict(state)
        assert_same(tensors(optimizer, params), before)
    # 16-bit moments widen, and wide ones are not rounded
    params = parameters(torch.bfloat16)
    narrow = kind(params, state_dtype=torch.bfloat16)
    train(narrow, params, 1)
    wide = kind(parameters(torch.bfloat16))
    wide.load_state_dict(narrow.state_dict())
    key = "momentum_buffer" if isinstance(wide, SGD) else "exp_avg"
    for p, q in zip(params, wide.param_groups[0]["params"], strict=True):
        assert wide.state[q][key].dtype == torch.float32
        assert torch.equal(wide.state[q][key], narrow.state[p][key].float())
    with pytest.raises(ValueError, match=rf"load_state_dict: {key} must have dtype bfloat16, got"):
        narrow.load_state_dict(wide.state_dict())


# Weights in FP32


class Net(torch.nn.Module):
    """Tied weights, buffers of 16 bits and integers, an fp32 norm, an fp16 param."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.gain = torch.nn.Parameter(normal((6,), torch.float32))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", normal((4,), torch.float32))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x).float()) * self.gain.float()
        return self.head(h.to(self.head.weight.dtype)).float()


def net() -> Net:
    torch.manual_seed(0)
    model = Net().bfloat16()
    model.gain.data = model.gain.data.half()
    model.norm.float()
    return model


def train_net(model: Net, optimizers: list, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randint(11, (8,))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16", None])
@pytest.mark.parametrize("count", [1, 2])
def test_fp32_state_dict(kind: Callable, masters: str | None, count: int) -> None:
    model = net()
    params = list(model.parameters())
    lists = [params] if count == 1 else [params[:2], params[2:]]
    optimizers = [kind(ps, lr=1e-3, master_weights=masters) for ps in lists]
    own = {k: v.clone() for k, v in model.state_dict().items()}
    fresh = fp32_state_dict(model, optimizers)
    for key, value in fresh.items():  # no masters yet: the same values, widened
        assert torch.equal(value, own[key].float() if own[key].dtype in LOW else own[key])
    train_net(model, optimizers, 3)
    own = {k: v.clone() for k, v in model.state_dict().items()}
    state = fp32_state_dict(model, optimizers[0] if count == 1 else optimizers)
    assert list(state) == list(own)
    low = {k for k, v in own.items() if v.dtype in LOW}
    assert low == {"embed.weight", "head.weight", "gain", "table"}
    for key, value in state.items():
        assert value.dtype == (torch.float32 if key in low else own[key].dtype)
        assert not value.requires_grad
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    assert state["mask"].dtype == torch.bool
    assert torch.equal(state["table"], own["table"].float())
    by_id = {id(p): o for o, ps in zip(optimizers, lists, strict=True) for p in ps}
    for key, p in model.named_parameters(remove_duplicate=False):
        assert torch.equal(state[key], truth(by_id[id(p)], p))
        if masters is not None and p.dtype in LOW:
            assert not torch.equal(state[key], p.float())  # it holds what the param cannot
    # copies
    for value in state.values():
        value.zero_()
    assert_same(list(model.state_dict().values()), list(own.values()))


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_an_fp32_state_dict_loads_into_an_fp32_model(kind: Callable, masters: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3, master_weights=masters)
    train_net(model, [optimizer], 3)
    state = saved(fp32_state_dict(model, optimizer))
    torch.manual_seed(5)
    wide = Net()
    wide.load_state_dict(state)
    for key, value in wide.state_dict().items():
        want = state[key]
        assert torch.equal(value, want)
    assert wide.head.weight is wide.embed.weight
    assert torch.equal(wide.embed.weight, truth(optimizer, model.embed.weight))


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_an_fp32_state_dict_loads_into_its_own_model(kind: Callable, masters: str) -> None:
    """The params are as before, and so is the rest of the run."""
    runs = []
    for through_fp32 in (False, True):
        model = net()
        optimizer = kind(model.parameters(), lr=1e-3, master_weights=masters)
        train_net(model, [optimizer], 3)
        if through_fp32:
            before = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(fp32_state_dict(model, optimizer))
            for key, value in model.state_dict().items():
                assert value.dtype == before[key].dtype
                assert torch.equal(value, before[key])
        train_net(model, [optimizer], 3)
        runs.append(tensors(optimizer, list(model.parameters())))
    assert_same(*runs)


@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_an_fp32_state_dict_of_exact_ties_loads_into_its_own_model(masters: str) -> None:
    """A master halfway between two bf16 numbers, on either side of zero, of 1 and of 1.0078125."""
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 1 + 2.0**-7, -1 - 2.0**-7]]))
    optimizer = SGD(model.parameters(), lr=2.0**-8, master_weights=masters)
    model.weight.grad = -model.weight.detach().sign()
    optimizer.step()
    want = torch.tensor([[1, -1, 1 + 2.0**-7, -1 - 2.0**-7]]) * 1.0
    want += want.sign() * 2.0**-8
    assert torch.equal(truth(optimizer, model.weight), want)
    param = model.weight.detach().clone()
    model.load_state_dict(fp32_state_dict(model, optimizer))
    assert torch.equal(model.weight, param)
    assert torch.equal(truth(optimizer, model.weight), want)


def test_an_fp32_state_dict_after_the_param_was_written() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train_net(model, [optimizer], 1)
    with torch.no_grad():
        model.gain[2] += 1
    with pytest.raises(ValueError, match=r"^fp32_state_dict: gain was written after the last step"):
        fp32_state_dict(model, optimizer)
    train_net(model, [optimizer], 1)  # as it says
    assert torch.equal(fp32_state_dict(model, optimizer)["gain"], truth(optimizer, model.gain))


def test_an_fp32_state_dict_of_weights_that_are_nan() -> None:
    """A run that has diverged can still be saved and looked at."""
    model = torch.nn.Linear(2, 1).bfloat16()
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    optimizer = AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = fp32_state_dict(model, optimizer)
    assert state["weight"].isnan().tolist() == [[True, False]]


# Copies


@kinds
@mixes
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_run_goes_on_as_the_original(kind: Callable, mix: dict, clone: Callable) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3, max_grad_value=2.0, **mix)
    train_net(model, [optimizer], 2)
    other, copied = clone((model, optimizer))
    ours, theirs = list(model.parameters()), list(other.parameters())
    assert copied.param_groups[0]["params"][0] is theirs[0]
    assert_same(tensors(copied, theirs), tensors(optimizer, ours))
    train_net(model, [optimizer], 2)
    before = tensors(copied, theirs)
    assert not torch.equal(before[0], ours[0])  # which have gone on alone
    train_net(other, [copied], 2)
    assert_same(tensors(copied, theirs), tensors(optimizer, ours))
    assert (copied.max_grad_value, copied.master_weights) == (2.0, optimizer.master_weights)


# Groups, gradients that come and go


@both
def test_closures_hooks_and_schedulers(kind: Callable, theirs: Callable) -> None:
    runs = []
    for make in (kind, theirs):
        p = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
        optimizer = make([p], lr=0.1)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def closure(optimizer: Any = optimizer, p: torch.Tensor = p) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(6):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        assert calls == ["before", "after"] * 6
        assert losses[-1] < losses[0] == 13.0
        runs.append((losses, p.detach(), optimizer.param_groups[0]["lr"]))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_params_without_gradients_in_some_steps(
    kind: Callable, theirs: Callable, dtype: torch.dtype
) -> None:
    """Another set of params has gradients in each step; a group is added on the way."""
    shapes = [(5,), (0,), (3, 2), (), (17,), (4,)]
    params, other = parameters(dtype, shapes), parameters(dtype, shapes)
    optimizer, expected = kind(params[:4], lr=0.01), theirs(other[:4], lr=0.01)
    counts = [0] * len(params)
    patterns = [0b000001, 0b001111, 0b000110, 0b111111, 0b111111, 0b100101, 0b011010, 0, 0b010101]
    for step, pattern in enumerate(patterns):
        if step == 3:
            optimizer.add_param_group({"params": params[4:], "lr": 0.1})
            expected.add_param_group({"params": other[4:], "lr": 0.1})
        for ps in (params, other):
            set_grads(ps, step)
            for i, p in enumerate(ps):
                if not pattern >> i & 1:
                    p.grad = None
        optimizer.step()
        expected.step()
        for i, p in enumerate(params):
            counts[i] += pattern >> i & 1
            assert int(optimizer.state[p].get("step", 0)) == counts[i]
    for p, o in zip(params, other, strict=True):
        torch.testing.assert_close(p, o, rtol=64 * torch.finfo(dtype).eps, atol=1e-6)
    assert counts == [6, 5, 6, 4, 4, 3]
    copied = kind(clones(params[:4]))
    copied.add_param_group({"params": clones(params[4:])})
    copied.load_state_dict(saved(optimizer.state_dict()))
    assert [int(s["step"]) for s in copied.state.values()] == counts


@kinds
@mixes
def test_gradients_that_come_and_go_with_16_bit_params(kind: Callable, mix: dict) -> None:
    """As if each param had been trained alone with the gradients that it got."""
    params = [p for p in mixed() if p.dtype != torch.float64]
    optimizer = kind(params, lr=0.01, **mix)
    grads: list[list[torch.Tensor]] = [[] for _ in params]
    for step in range(6):
        set_grads(params, step)
        for i, p in enumerate(params):
            if (step + i) % 3 == 0 or (step == 4 and i < 2):
                p.grad = None
            else:
                grads[i].append(p.grad.clone())
        optimizer.step()
    for i, p in enumerate(params):
        alone = mixed()[: len(params)]
        single = kind(alone, lr=0.01, **mix)
        for grad in grads[i]:
            alone[i].grad = grad
            single.step()
        assert_same(tensors(single, [alone[i]]), tensors(optimizer, [p]))
        assert set(single.state) == {alone[i]}


@kinds
def test_frozen_and_empty_params(kind: Callable) -> None:
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


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_a_group_added_on_the_way_and_one_refused(kind: Callable, dtype: torch.dtype) -> None:
    params, other = parameters(dtype), parameters(dtype)
    optimizer = kind(params[:3], lr=0.01)
    first, second = kind(other[:3], lr=0.01), kind(other[3:], lr=0.2)
    train(optimizer, params[:3], 2)
    train(first, other[:3], 2)
    with pytest.raises(ValueError, match=r"lr must be"):
        optimizer.add_param_group({"params": params[3:], "lr": -1.0})
    whole = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"params must be fp32, bf16, fp16 or fp64, got torch.int"):
        optimizer.add_param_group({"params": [whole]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[3:], "lr": 0.2})
    for step in range(2, 4):
        set_grads(params, step)
        set_grads(other, step)
        for o in (optimizer, first, second):
            o.step()
    assert_same(
        tensors(optimizer, params), [*[p.detach() for p in other], *tensors(first, other[:3])[3:],
                                     *tensors(second, other[3:])[3:]]
    )  # fmt: skip


# Whoever else writes the state


@kinds
@pytest.mark.parametrize("how", ["in place", "another tensor", "loaded", "of one element"])
def test_a_count_that_someone_sets(kind: Callable, how: str) -> None:
    """state[p]["step"] is what counts, however it got there."""
    params = parameters()
    optimizer = kind(params, lr=0.01)
    train(optimizer, params, 2)
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


@kinds
def test_one_tensor_set_for_all_counts(kind: Callable) -> None:
    params = parameters()
    optimizer = kind(params)
    train(optimizer, params, 2)
    shared = torch.tensor(10.0)
    for state in optimizer.state.values():
        state["step"] = shared
    train(optimizer, params, 3)
    assert {s["step"].item() for s in optimizer.state.values()} == {13.0}
    assert shared.item() == 10.0


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_moments_that_someone_replaces(kind: Callable, dtype: torch.dtype) -> None:
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
@mixes
def test_a_state_that_someone_clears(kind: Callable, mix: dict) -> None:
    """As restarts do: training goes on as with a new optimizer."""
    for clear in (
        lambda o: o.state.clear(),
        lambda o: setattr(o, "state", defaultdict(dict)),
        lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    ):
        params = [torch.nn.Parameter(normal((9,), torch.bfloat16))]
        optimizer = kind(params, lr=0.01, **mix)
        train(optimizer, params, 2)
        other = clones(params)
        expected = kind(other, lr=0.01, **mix)
        clear(optimizer)
        train(optimizer, params, 2)
        train(expected, other, 2)
        assert_same(tensors(optimizer, params), tensors(expected, other))


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_a_model_cast_to_fp32_goes_on_from_its_masters(kind: Callable, masters: str) -> None:
    """model.float() widens the params in place: not a bit of the FP32 numbers is lost."""
    model = torch.nn.Linear(5, 3).bfloat16()
    optimizer = kind(model.parameters(), lr=1e-3, master_weights=masters)
    params = list(model.parameters())
    train(optimizer, params, 3)
    wide = [torch.nn.Parameter(truth(optimizer, p).clone()) for p in params]
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
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(truth(optimizer, p), w)


@kinds
def test_a_model_cast_to_bf16_gets_masters(kind: Callable) -> None:
    """model.bfloat16() after the first steps: from then on small updates need masters."""
    model = torch.nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=1e-6)
    params = list(model.parameters())
    train(optimizer, params, 2)
    optimizer.zero_grad()
    model.bfloat16()
    train(optimizer, params, 2)
    for p in params:
        assert "master" in optimizer.state[p]
        assert torch.equal(optimizer.state[p]["master"].bfloat16(), p)
