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
from optimizers import (
    KINDS,
    LOW,
    Kind,
    Params,
    assert_close,
    assert_same,
    clones,
    copies,
    kinds,
    parameters,
    set_grads,
    tensors,
    through_a_file,
    train,
    trained,
)

from mixprec.ops import join_master
from mixprec.optim import SGD, Adam, AdamW, fp32_state_dict

MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"master_weights": "remainder16"},
    {"master_weights": None},
    {"state_dtype": torch.bfloat16, "master_weights": "remainder16"},
    {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
)


def mixed() -> Params:
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    return [
        torch.nn.Parameter(normal(s, d, seed=i))
        for i, (s, d) in enumerate(zip(((3, 5), (7,), (2, 2), (0,), (9,)), dtypes, strict=True))
    ]


def master_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """The FP32 number that is trained."""
    state = optimizer.state[p]
    if "remainder" in state:
        return join_master(p.detach(), state["remainder"])
    return state.get("master", p.detach()).float()


# Resuming


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


THEIRS = "AdamW Adam SGD RAdam NAdam Adamax Adagrad RMSprop Rprop ASGD Adadelta Adafactor"
OTHERS = (AdamW, Adam, SGD, *(getattr(torch.optim, word) for word in THEIRS.split()))


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD], ids=name)
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


# Damage: (what is changed, the message). In a state of 6 params, of which the fourth has 129.


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


def test_load_hooks_see_the_tensors() -> None:
    optimizer, params = trained(AdamW, torch.bfloat16, 1)
    seen = []

    def before(optimizer: AdamW, state: dict) -> dict:
        seen.append(state["state"][0]["master"].dtype)
        state["param_groups"][0]["lr"] = 0.25
        return state

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state[params[0]]["master"].dtype)
    )
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32] * 4
    assert optimizer.param_groups[0]["lr"] == 0.25


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
@pytest.mark.parametrize(("masters", "count"), [("auto", 1), ("remainder16", 2), (None, 2)])
def test_fp32_state_dict(kind: Kind, masters: str | None, count: int) -> None:
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
    assert torch.equal(state["table"], own["table"].float())
    by_id = {id(p): o for o, ps in zip(optimizers, lists, strict=True) for p in ps}
    for key, p in model.named_parameters(remove_duplicate=False):
        assert torch.equal(state[key], master_of(by_id[id(p)], p))
        if masters is not None and p.dtype in LOW:
            assert not torch.equal(state[key], p.float())  # it holds what the param cannot
    for value in state.values():  # copies
        value.zero_()
    assert_same(list(model.state_dict().values()), list(own.values()))


@kinds
@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_an_fp32_state_dict_loads(kind: Kind, masters: str) -> None:
    """Into an fp32 model, which gets all its bits, and into its own: the run stays as it is."""
    runs = []
    for through_fp32 in (False, True):
        model = net()
        optimizer = kind(model.parameters(), lr=1e-3, master_weights=masters)
        train_net(model, [optimizer], 3)
        if through_fp32:
            state = through_a_file(fp32_state_dict(model, optimizer))
            wide = Net()
            wide.load_state_dict(state)
            assert_same(list(wide.state_dict().values()), list(state.values()))
            assert wide.head.weight is wide.embed.weight
            assert torch.equal(wide.embed.weight, master_of(optimizer, model.embed.weight))
            before = [v.clone() for v in model.state_dict().values()]
            model.load_state_dict(state)
            assert_same(list(model.state_dict().values()), before)
        train_net(model, [optimizer], 3)
        runs.append(tensors(optimizer, list(model.parameters())))
    assert_same(*runs)


@pytest.mark.parametrize("masters", ["auto", "remainder16"])
def test_an_fp32_state_dict_of_exact_ties_loads_into_its_own_model(masters: str) -> None:
    """A master halfway between two bf16 numbers, on either side of zero, of 1 and of 1.0078125.

    A master's param is the even one of the two, a remainder's the larger.
    """
    ulp = 2.0**-7
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 1 + ulp, -1 - ulp]]))
    optimizer = SGD(model.parameters(), lr=ulp / 2, master_weights=masters)
    want = model.weight.float() + ulp / 2 * model.weight.sign()
    model.weight.grad = -model.weight.detach().sign()
    optimizer.step()
    assert torch.equal(master_of(optimizer, model.weight), want)
    one = 1.0 if masters == "auto" else 1 + ulp
    param = torch.tensor([[one, -one, 1 + 2 * ulp, -1 - 2 * ulp]]).bfloat16()
    assert torch.equal(model.weight, param)
    model.load_state_dict(fp32_state_dict(model, optimizer))
    assert torch.equal(model.weight, param)
    assert torch.equal(master_of(optimizer, model.weight), want)


def test_an_fp32_state_dict_after_the_param_was_written() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train_net(model, [optimizer], 1)
    with torch.no_grad():
        model.gain[2] += 1
    with pytest.raises(ValueError, match=r"^fp32_state_dict: gain was written after the last step"):
        fp32_state_dict(model, optimizer)
    train_net(model, [optimizer], 1)  # as it says
    assert torch.equal(fp32_state_dict(model, optimizer)["gain"], master_of(optimizer, model.gain))


def test_an_fp32_state_dict_of_weights_that_are_nan() -> None:
    """A run that has diverged can still be saved and looked at."""
    model = torch.nn.Linear(2, 1).bfloat16()
    model.weight.data[0, 0] = math.nan
    optimizer = AdamW(model.parameters())
    train(optimizer, list(model.parameters()), 1)
    assert fp32_state_dict(model, optimizer)["weight"].isnan().tolist() == [[True, False]]


# Copies


@kinds
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_run_goes_on_as_the_original(kind: Kind, clone: Callable) -> None:
    for mix in MIXES:
        model = net()
        optimizer = kind(model.parameters(), lr=1e-3, max_grad_value=2.0, **mix)
        train_net(model, [optimizer], 2)
        next(model.parameters()).grad.fill_(math.nan)
        optimizer.step()
        other, copied = clone((model, optimizer))
        ours, theirs = list(model.parameters()), list(other.parameters())
        assert copied.param_groups[0]["params"][0] is theirs[0]
        assert copied.skipped.item() == 1
        assert_same(tensors(copied, theirs), tensors(optimizer, ours))
        train_net(model, [optimizer], 2)
        before = tensors(copied, theirs)
        assert not torch.equal(before[0], ours[0])  # which have gone on alone
        train_net(other, [copied], 2)
        assert_same(tensors(copied, theirs), tensors(optimizer, ours))
        assert (copied.max_grad_value, copied.master_weights) == (2.0, optimizer.master_weights)


# Groups, gradients that come and go


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


# Whoever else writes the state


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
