"""Delayed scaling in a layer: when an amax is recorded, when scales change, what is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import for_each, pairwise
from independent import assert_same_lists
from ranks import on_ranks
from torch import nn

import mixprec
from mixprec import scaling
from mixprec.nn import Conv2d, Linear
from mixprec.ops.delayed_scales import UNUSED
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import plain_state_dict, update_scales

DELAYED = RECIPES["fp8-delayed"]
KINDS = ("linear", "1x1", "3x3")


def make(recipe: Recipe | str = DELAYED, bias: bool = False, kind: str = "linear") -> nn.Module:
    if kind == "linear":
        return Linear(4, 4, bias=bias, recipe=recipe)
    return Conv2d(4, 4, int(kind[0]), bias=bias, recipe=recipe)


def amaxes(layer: nn.Module) -> list[float]:
    """What was seen of x and g since the last update."""
    return [layer.amax.item(), layer.grad_amax.item()]


def run(layer: nn.Module, x: float = 1.0, g: float = 1.0) -> None:
    """A pass forward and backward with these as the largest input and gradient."""
    shape = (2, 4) if isinstance(layer, Linear) else (2, 4, *layer.kernel_size)
    y = layer(torch.full(shape, x).requires_grad_())
    y.backward(torch.full_like(y, g))


@for_each("margin", [0, 2])
@for_each("kind", KINDS)
def test_a_step_casts_with_the_scale_of_the_one_before(kind: str, margin: int) -> None:
    layer = make(replace(DELAYED, name="short", history=2, margin=margin), kind=kind)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    rows = [  # amax of x, amax of g -> scales of x and g after the step, without the margin
        (7.0, 1.0, 64.0, 32768.0),
        (1.0, 8.0, 64.0, 4096.0),  # the window holds two steps
        (1.0, 1.0, 256.0, 4096.0),
        (1.0, 1.0, 256.0, 32768.0),
    ]
    for x, g, *scales in rows:
        before = layer.scale.clone()
        run(layer, x, g)
        assert torch.equal(layer.scale, before), "nothing may change inside a step"
        assert amaxes(layer) == [x, g]
        update_scales(layer)
        assert layer.scale.tolist() == [scale * 2.0**-margin for scale in scales]
        assert amaxes(layer) == [UNUSED] * 2
    # E4M3 holds 448: with scale 256, what is larger than 1.75 saturates in the first step.
    y = layer(torch.full((1, *layer.weight[0].shape), 7.0))
    assert y.flatten().tolist() == [1.75 * 2**margin * 0.5 * layer.weight[0].numel()] * 4


def test_what_was_not_used_is_not_rolled() -> None:
    used, idle = make(), make()
    model = nn.ModuleList([used, idle])
    run(idle, 2.0)
    update_scales(model)
    before = [idle.amax_history.clone(), idle.scale.clone()]
    for _ in range(3):
        run(used)
        update_scales(model)
    assert_same_lists([idle.amax_history, idle.scale], before)
    used(torch.full((2, 4), 5.0))  # of one layer, the gradient alone may be missing
    update_scales(model)
    assert used.amax_history[:, :5].tolist() == [[5.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0, 0]]


@for_each("kind", KINDS)
def test_without_grad_mode_nothing_is_recorded(kind: str) -> None:
    layer = make(kind=kind).eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            layer(torch.full((2, 4, 3, 3) if kind != "linear" else (2, 4), 9.0))
    assert amaxes(layer) == [UNUSED] * 2


@for_each("number", [math.inf, math.nan])
@for_each("where, kind", pairwise(["x", "g"], KINDS))
def test_a_step_that_is_not_finite_leaves_no_trace(where: str, kind: str, number: float) -> None:
    layer, row = make(kind=kind), "xg".index(where)
    run(layer, 2.0, 3.0)
    update_scales(layer)
    before = [layer.amax_history[row].clone(), layer.scale[row].clone()]
    run(layer, **{where: number})
    run(layer)  # a finite pass in the same step does not hide it
    assert not math.isfinite(amaxes(layer)[row])
    update_scales(layer)
    assert_same_lists([layer.amax_history[row], layer.scale[row]], before)


@for_each("make_optimizer", [torch.optim.SGD, mixprec.optim.AdamW])
def test_every_optimizer_step_updates_the_scales(make_optimizer: Callable) -> None:
    layer, frozen = make(), make()
    frozen.requires_grad_(False)
    optimizer = make_optimizer(layer.parameters(), lr=0.1)
    for x, g in ((7.0, 0.5), (3.0, 4.0), (1.0, 1.0)):
        run(layer, x, g)
        run(frozen, x, g)
    assert amaxes(layer) == [7.0, 4.0], "the maximum of all passes"
    optimizer.step()
    for of in (layer, frozen):
        assert of.scale[0] == 64.0
        assert of.amax_history[0].tolist() == [7.0] + [0.0] * 15
    update_scales(layer)  # once more, by hand: nothing was used since
    optimizer.step()
    assert layer.amax_history[0].tolist() == [7.0] + [0.0] * 15


def test_automatic_updates_can_be_turned_off() -> None:
    layer = make()
    run(layer, 7.0)
    scaling.set_automatic_updates(False)
    try:
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    finally:
        scaling.set_automatic_updates(True)
    assert layer.amax == 7.0


def test_what_is_left_of_another_model_does_not_end_the_training_of_this_one(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A layer whose state was replaced, with a warning, and one that was only traced, without."""
    bad, good = make(), make()
    bad.name, bad.scale = "old", torch.zeros(3)
    with torch._subclasses.FakeTensorMode():
        fake = make()
    optimizer = torch.optim.SGD(good.parameters(), lr=0.1)
    good(torch.ones(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="^the scales of old cannot be updated and stay as they"):
        optimizer.step()
    assert good.scale.all(), "both are set"
    before = good.scale.clone()
    good(torch.ones(2, 4) * 100).sum().backward()
    optimizer.step()
    assert not recwarn.list
    assert good.scale[0] < before[0]
    assert type(fake.amax) is not torch.Tensor


def test_copies_that_share_buffers_are_updated_once() -> None:
    layer = make()
    shallow = copy.copy(layer)
    shallow._buffers = layer._buffers
    scaling.follow(shallow)
    run(layer)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer.amax_history[0].tolist()[:2] == [1.0, 0.0]


def test_one_op_call_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([make(kind=kind) for kind in KINDS])
    for layer in model:
        run(layer)
    calls: list[int] = []
    monkeypatch.setattr(scaling, "update_delayed_scales_", lambda *a, **k: calls.append(len(a[0])))
    update_scales(model)
    assert calls == [6]
    with pytest.raises(TypeError, match=r"process_group must be a ProcessGroup .*, got 'gloo'"):
        update_scales(make(), "gloo")
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.BatchNorm1d(4))
    keys = list(model.state_dict())
    assert list(plain_state_dict(mixprec.convert(model, "fp8-delayed"))) == keys


# --- state ---------------------------------------------------------------------------------------


def trained() -> nn.Module:
    layer = make(bias=True)
    run(layer, 3.0)
    update_scales(layer)
    return layer


@for_each("assign", [False, True])
def test_state_dicts(assign: bool) -> None:
    layer, other, plain = trained(), make(bias=True), nn.Linear(4, 4)
    saved = copy.deepcopy(layer.state_dict())
    run(other, 100.0)
    other.load_state_dict(dict([*saved.items()][:-2]), assign=assign)  # without amaxes: unused ones
    assert_same_lists(list(other.state_dict().values()), list(layer.state_dict().values()))
    assert amaxes(other) == [UNUSED] * 2, "a step that was under way is over"
    run(skipped := copy.deepcopy(layer), 50.0)  # torch's GradScaler skips it, without a word
    other.load_state_dict(skipped.state_dict(), assign=assign)
    assert amaxes(other) == amaxes(skipped) != [UNUSED] * 2

    # Into any other recipe and into torch's own layer, and back from there.
    for recipe in ("fp8", "bf16"):
        make(recipe, bias=True).load_state_dict(saved, assign=assign)
    plain.load_state_dict(plain_state_dict(copy.deepcopy(layer)), assign=assign)
    assert torch.equal(plain.weight, layer.weight)
    other.load_state_dict(plain.state_dict(), assign=assign)
    assert other.scale.tolist() == [0.0] * 2, "scales belong to the weights of before"
    assert set(saved) == {"weight", "bias", *scaling.BUFFERS}, "it was written to"


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_stay_fp32_in_any_model(dtype: torch.dtype) -> None:
    layer = trained()
    layer.amax_history[1, 0] = math.pi
    history = layer.amax_history.clone()
    nn.Sequential(layer).to(dtype)
    assert layer.weight.dtype == dtype
    assert {layer._buffers[name].dtype for name in scaling.BUFFERS} == {torch.float32}
    assert torch.equal(layer.amax_history, history)
    assert layer.half().scale.dtype == torch.float32


@for_each("fill", ["to_empty", "reset", "assign"])
def test_meta_device(fill: str) -> None:
    with torch.device("meta"):
        layer = make(bias=True)
    assert all(b.is_meta for b in layer.buffers())
    if fill == "assign":
        layer.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
    else:
        layer.to_empty(device="cpu")
    if fill == "reset":
        layer.scale.fill_(3.0)
        layer.reset_parameters()
    assert not layer.scale.any()
    assert not layer.amax_history.any()
    assert amaxes(layer) == [UNUSED] * 2


# --- ranks (of several precisions and wrappers: tests/training/test_distributed.py) ------------


def on_one_rank(largest: list[float]) -> tuple[list[float], list[float], list[int]]:
    rank = dist.get_rank()
    model = nn.ModuleDict({"a": make(), "b": make()})
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(a[0].numel()), all_reduce(*a, **k))[1]
    run(model["a"], largest[rank])
    if rank == 0:
        run(model["b"], 2.0)
    update_scales(model, dist.group.WORLD)
    dist.all_reduce = all_reduce
    return model["a"].scale.tolist(), model["b"].amax_history[:, 0].tolist(), calls


@pytest.mark.parametrize("largest", [[1.0, 7.0], [1.0, math.nan]])
def test_ranks_share_the_largest_amax_in_one_call(largest: list[float]) -> None:
    """NaN on one rank keeps the step out on all; what is used on one rank is rolled on all."""
    for scale, history, calls in on_ranks(2, on_one_rank, largest=largest):
        assert scale[0] == (64.0 if largest[1] == 7.0 else 0.0)
        assert history[0] == 2.0
        assert calls == [2 * 4]
