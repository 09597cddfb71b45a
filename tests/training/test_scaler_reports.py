"""What a GradScaler reports: which parameters overflowed or underflowed, and what was skipped."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import normal
from optimizers import (
    OURS,
    Make,
    every_optimizer,
    every_way,
    our_adamw,
    our_clipping_adamw,
    our_sgd,
    through_a_file,
    torch_fused,
    torch_plain,
    torch_sgd,
    with_optimizers,
)
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.grad_report import Overflow, Underflow

Optimizer = torch.optim.Optimizer
INF, NAN = math.inf, math.nan


def param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def filled(shape: tuple[int, ...], *values: float, dtype: torch.dtype = torch.float32) -> Any:
    """Ones, but for the first elements."""
    grad = torch.ones(shape, dtype=dtype)
    grad.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
    return grad


def step(scaler: GradScaler, optimizer: Optimizer, explicit: bool = False) -> None:
    scaler.scale(torch.zeros(()))
    if explicit:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GradScaler.unscale_: unscaled gradients are rounded")
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def iterate(scaler: GradScaler, optimizer: Optimizer, p: torch.Tensor, *values: float) -> None:
    """One iteration in which p's gradient starts with `values`, the rest ones."""
    p.grad = filled(tuple(p.shape), *values, dtype=p.dtype)
    step(scaler, optimizer)


class Model(nn.Module):
    """Three parameters, one of them shared by two modules."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3, dtype=dtype)
        self.head = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.tied = nn.Linear(5, 3, bias=False, dtype=dtype)
        self.tied.weight = self.body.weight

    def spoil(self, weight: tuple = (), bias: tuple = (), head: tuple = ()) -> None:
        wanted = {self.body.weight: weight, self.body.bias: bias, self.head.weight: head}
        for p, values in wanted.items():
            p.grad = filled(tuple(p.shape), *values, dtype=p.dtype)


# Overflow


@every_way
@every_optimizer
def test_which_parameters_overflowed_and_how(make: Make, explicit: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if make in OURS else [])
    for dtype in dtypes:
        model = Model(dtype)
        optimizer, scaler = make(model.parameters()), GradScaler(model=model)
        assert scaler.overflow_report() == []
        model.spoil(weight=(INF, NAN, -INF), bias=(NAN, NAN))
        step(scaler, optimizer, explicit)
        expected = [Overflow("body.bias", 3, 0, 2), Overflow("body.weight", 15, 2, 1)]
        assert scaler.overflow_report() == expected
        assert list(map(str, expected)) == [
            "body.bias: 2 NaN among 3",
            "body.weight: 1 NaN and 2 Inf among 15",
        ]
        for _ in range(3):  # kept while nothing else overflows
            model.spoil()
            step(scaler, optimizer, explicit)
            assert scaler.overflow_report() == expected
        model.spoil(head=(-INF,))
        step(scaler, optimizer, explicit)
        assert scaler.overflow_report() == [Overflow("head.weight", 4, 1, 0)]
        assert scaler.skipped.item() == 2
        if make in OURS:
            assert optimizer.overflow_report(model) == scaler.overflow_report()
            assert optimizer.underflow_report(model) == scaler.underflow_report()


@every_way
@every_optimizer
def test_values_that_unscaling_makes_infinite_are_overflows(make: Make, explicit: bool) -> None:
    """A scale below 1: finite gradients that are infinite once unscaled."""
    p = param(6)
    optimizer, scaler = make([p]), GradScaler(init_scale=2.0**-10)
    p.grad = filled((6,), 1e37, -1e37, NAN, INF, 1e30)
    step(scaler, optimizer, explicit)
    assert [each[1:] for each in scaler.overflow_report()] == [(6, 3, 1)]
    assert torch.equal(p, torch.ones(6))


@every_optimizer
def test_names(make: Make) -> None:
    """The model's, given now or at first; the optimizer's; or else the place."""
    model = Model()
    places = ["param_groups[0]['params'][0] of shape (2, 2)",
              "param_groups[1]['params'][0] of shape (3, 5)",
              "param_groups[1]['params'][1] of shape (3,)"]  # fmt: skip
    groups = [{"params": model.head.parameters()}, {"params": model.body.parameters()}]
    spoiled = {"weight": (NAN,), "bias": (NAN,), "head": (NAN,) * 3}

    def names(scaler: GradScaler, optimizer: Optimizer, *model_: nn.Module) -> list[str]:
        model.spoil(**spoiled)
        step(scaler, optimizer)
        return [each.name for each in scaler.overflow_report(*model_)]

    by_model = ["head.weight", "body.bias", "body.weight"]  # the largest share first
    assert names(GradScaler(), make(groups)) == [places[0], places[2], places[1]]
    assert names(GradScaler(), make(groups), model) == by_model
    assert names(GradScaler(model=model), make(groups)) == by_model
    assert names(GradScaler(model=nn.Linear(1, 1)), make(groups), model) == by_model
    assert names(GradScaler(), make(model.named_parameters())) == by_model
    other = nn.Sequential(model)
    assert names(GradScaler(model=model), make(groups), other) == [f"0.{n}" for n in by_model]
    gone = nn.Linear(1, 1)
    scaler, alive = GradScaler(model=gone), weakref.ref(gone)
    del gone
    gc.collect()
    assert alive() is None
    assert names(scaler, make(groups)) == [places[0], places[2], places[1]]


@every_way
@every_optimizer
def test_parameters_without_gradients_and_added_ones(make: Make, explicit: bool) -> None:
    a, b, late = param(2), param(3), param(4)
    optimizer, scaler = make([a, b]), GradScaler()
    found = Overflow("param_groups[0]['params'][1] of shape (3,)", 3, 0, 1)
    added = Overflow("param_groups[1]['params'][0] of shape (4,)", 4, 1, 1)
    for i, (grads, report) in enumerate(
        (
            ({b: [NAN]}, found),
            ({a: []}, found),  # b is an expert that was not chosen, say
            ({b: [], late: []}, found),
            ({b: [], late: [INF, NAN]}, added),
        )
    ):
        if i == 2:
            optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        for p, values in grads.items():
            p.grad = filled(tuple(p.shape), *values)
        step(scaler, optimizer, explicit)
        assert scaler.overflow_report() == [report]
    assert [each[1:] for each in scaler.underflow_report()] == [(3, 0, 0), (4, 0, 0)]


@pytest.mark.parametrize(
    "makes", [(our_adamw, our_sgd), (torch_fused, our_adamw), (torch_plain, torch_sgd)]
)
def test_several_optimizers(makes: tuple[Make, Make]) -> None:
    params = [param(4), param(8)]
    optimizers = [make([p]) for make, p in zip(makes, params, strict=True)]
    scaler = GradScaler()
    scaler.scale(torch.zeros(()))

    def iterate_both(first: tuple, second: tuple) -> list[tuple]:
        for p, optimizer, bad in zip(params, optimizers, (first, second), strict=True):
            p.grad = filled(tuple(p.shape), *bad)
            scaler.step(optimizer)
        scaler.update()
        return [each[1:] for each in scaler.overflow_report()]

    assert iterate_both((), (INF,)) == [(8, 1, 0)]
    assert iterate_both((NAN,), (0.0,)) == [(4, 0, 1), (8, 1, 0)]  # each at its own last overflow
    assert iterate_both((), (NAN,) * 3) == [(8, 0, 3), (4, 0, 1)]
    assert [each[1:] for each in scaler.underflow_report()] == [(4, 0, 0), (8, 0, 0)]
    assert scaler.skipped.item() == 3
    optimizers.pop()
    gc.collect()  # the scaler keeps no optimizer alive
    assert [each[1:] for each in scaler.overflow_report()] == [(4, 0, 1)]


# Underflow


@every_way
@with_optimizers(torch_plain, torch_fused, our_adamw, our_sgd)
def test_underflow_is_of_the_last_step_and_of_scaled_gradients(make: Make, explicit: bool) -> None:
    """5 values that are subnormal until the scale has grown 2^4 times.

    (tests/ops/test_grad_stats.py compares the counts of any values with the bits.)
    """
    p = param(8, dtype=torch.float16 if make in OURS else torch.float32)
    optimizer, scaler = make([p]), GradScaler(init_scale=2.0**4, growth_interval=1)
    tiny = torch.finfo(p.dtype).smallest_normal
    values = torch.tensor([0.0, -0.0, 1.0] + [-tiny / 2**8] * 5, dtype=torch.float64)
    for _ in range(5):
        p.grad = (values * scaler.get_scale()).to(p.dtype)
        expected = int((p.grad[3:].abs() < tiny).sum())
        step(scaler, optimizer, explicit)
        (found,) = scaler.underflow_report()
        assert found[1:] == (8, 2, expected)
        assert found.share == expected / 6
    assert scaler.get_scale() == 2.0**9
    assert found == Underflow("param_groups[0]['params'][0] of shape (8,)", 8, 2, 0)
    assert str(found).endswith(": 25.0% zeros, 0.0% of the rest subnormal")
    assert Underflow("x", 0, 0, 0).share == Underflow("x", 3, 3, 0).share == 0.0


# Early growth


@with_optimizers(our_adamw, our_sgd, torch_fused, torch_plain)
def test_early_growth(make: Make) -> None:
    """After a twentieth of the interval, here 3 updates, if more than a quarter is subnormal.

    (tests/ops/test_scale.py has all of the rule.)
    """
    dtype = torch.float16 if make in OURS else torch.float32
    tiny = torch.finfo(dtype).smallest_normal / 4
    zeros = filled((8,), 0.0, 0.0, 0.0, 0.0, dtype=dtype)
    quarter, more = zeros.clone(), zeros.clone()
    quarter[4], more[4:6] = tiny, -tiny
    for grad, threshold, interval, factor in (
        (more, 0.25, 60, 2.0),
        (more, 0.5, 60, 1.0),  # not more than that
        (quarter, 0.25, 60, 1.0),
        (zeros, 0.0, 60, 1.0),  # zeros are no underflow
        (more, None, 60, 1.0),
        (more, 0.25, None, 1.0),  # a static scale
    ):
        p, seen = param(8, dtype=dtype), []
        optimizer = make([p])
        scaler = GradScaler(init_scale=1.0, growth_interval=interval, grow_on_underflow=threshold)
        for _ in range(7):
            p.grad = grad.clone()
            step(scaler, optimizer)
            seen.append(scaler.get_scale())
        assert seen == [1, 1, factor, factor, factor, factor**2, factor**2], (grad, threshold)


def test_early_growth_looks_at_the_worst_optimizer() -> None:
    a, b = param(4, dtype=torch.float16), param(4000, dtype=torch.float16)
    optimizers = [our_adamw([a]), our_sgd([b])]
    scaler = GradScaler(init_scale=1.0, growth_interval=20, grow_on_underflow=0.5)
    for _ in range(3):
        scaler.scale(torch.zeros(()))
        a.grad, b.grad = torch.full_like(a, 1e-7), torch.ones_like(b)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    step(scaler, optimizers[1])  # the other one, of long ago, does not count
    assert scaler.get_scale() == 8.0


# Many skips in a row


@every_optimizer
def test_the_error_after_many_skips_names_the_worst_parameter(make: Make) -> None:
    model = Model()
    optimizer = make(model.parameters())
    scaler = GradScaler(max_consecutive_skips=3, model=model)
    raised = {}
    for i in range(1, 14):
        if i == 8:
            model.spoil()
        else:
            model.spoil(weight=(INF,) * 6, head=(NAN, INF))
        before = scaler.get_scale()
        try:
            step(scaler, optimizer)
        except RuntimeError as error:
            raised[i] = str(error)
        assert scaler.get_scale() == before * (1 if i == 8 else 0.5)  # in any case
    assert list(raised) == [3, 6, 11]  # again after as many more; a good step starts anew
    assert raised[3].startswith(
        "GradScaler: the last 3 updates were all skipped (max_consecutive_skips=3); the loss scale "
        "is 8192. Worst: head.weight: 1 NaN and 1 Inf among 4."
    )
    assert raised[6].startswith("GradScaler: the last 6 updates were all skipped")
    assert scaler.skipped.item() == 12


@every_optimizer
def test_the_callback_after_many_skips_gets_the_report(make: Make) -> None:
    p, calls = param(4), []
    optimizer = make([("weight", p)])
    scaler = GradScaler(max_consecutive_skips=2, on_max_skips=calls.append)
    for bad in ([INF], [NAN], [], [INF], [INF, NAN], [INF], [INF], [INF], [], [NAN], [NAN]):
        iterate(scaler, optimizer, p, *bad)
    found = [(0, 1), (1, 1), (1, 0), (0, 1)]  # Inf and NaN
    assert calls == [[Overflow("weight", 4, *counts)] for counts in found]


class StopTraining(Exception):
    pass


def test_what_the_callback_raises_arrives() -> None:
    def stop(report: list[Overflow]) -> None:
        raise StopTraining(report[0].name)

    p = param(4)
    optimizer = our_adamw([p])
    scaler = GradScaler(max_consecutive_skips=1, on_max_skips=stop)
    with pytest.raises(StopTraining, match=r"'params'\]\[0\]"):
        iterate(scaler, optimizer, p, NAN)
    assert scaler.get_scale() == 2.0**15
    iterate(scaler, optimizer, p)  # the iteration was ended properly
    assert torch.all(p != 1)


def test_an_overflow_reported_by_the_flag_alone() -> None:
    """As when another rank overflowed: there is no worst parameter here to name."""
    p = param(4)
    optimizer, scaler = our_adamw([p]), GradScaler(max_consecutive_skips=1)
    scaler.scale(torch.zeros(()))
    p.grad = filled((4,))
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"scale is 32768\. If it goes on"):
        scaler.update()
    assert scaler.overflow_report() == []


COPIES: dict[str, Callable[[GradScaler], GradScaler]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "state_dict": lambda scaler: loaded(scaler.state_dict()),
}
SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**8,
    "growth_interval": 40,
    "hysteresis": 2,
    "max_scale": 2.0**12,
    "max_consecutive_skips": 3,
    "grow_on_underflow": 0.0,
}


def loaded(state: dict) -> GradScaler:
    scaler = GradScaler(max_consecutive_skips=3, grow_on_underflow=0.0)
    scaler.load_state_dict(through_a_file(state))
    return scaler


@with_optimizers(our_adamw, our_clipping_adamw, torch_fused)
@pytest.mark.parametrize("way", COPIES)
def test_a_copied_scaler_goes_on_as_the_original(way: str, make: Make) -> None:
    """Copied after any step: scale, trackers and counts, and when, and what, it raises."""

    def run(copied_after: int) -> list[Any]:
        p, seen = param(4), []
        optimizer, scaler = make([p]), GradScaler(**SETTINGS)
        for i in range(16):
            p.grad = filled((4,), *([NAN] if i % 9 < 7 else [1e-39]))
            try:
                step(scaler, optimizer, explicit=i % 2 == 0)
            except RuntimeError as error:
                seen.append((i, str(error)))
            if i == copied_after:
                scaler = COPIES[way](scaler)
            seen.append((scaler.state_dict(), scaler.last_step_skipped))
        seen.append(scaler.overflow_report())
        return seen

    expected = run(-1)
    assert [each[0] for each in expected if isinstance(each[-1], str)] == [2, 5, 11, 14]
    assert len({each[0]["scale"] for each in expected if isinstance(each[0], dict)}) > 5
    for after in range(12):
        assert run(after) == expected, after


# Counters


@every_way
@every_optimizer
def test_counters(make: Make, explicit: bool) -> None:
    p = param(4)
    optimizer, scaler = make([p]), GradScaler()
    assert not scaler.last_step_skipped
    seen, read = [(0, 0)], [(scaler.skipped, scaler.applied_steps)]
    for i, bad in enumerate(([], [INF], [NAN], [], [INF], [])):
        p.grad = filled((4,), *bad)
        step(scaler, optimizer, explicit)
        seen.append((seen[-1][0] + len(bad), seen[-1][1] + (not bad)))
        read.append((scaler.skipped, scaler.applied_steps))
        assert scaler.last_step_skipped == bool(bad)
        assert scaler.state_dict()["skipped_in_a_row"] == (2 if i == 2 else len(bad))
    assert [(a.item(), b.item()) for a, b in read] == seen  # later steps do not write on them
    assert {(t.dtype, t.dim()) for pair in read for t in pair} == {(torch.int64, 0)}
    counts = scaler.state_dict()
    p.grad = filled((4,), INF)
    scaler.step(optimizer)
    scaler.update(2.0**16)  # a scale set by hand: not an update that says how the step went
    assert scaler.state_dict() | {"scale": 0} == counts | {"scale": 0}
    if make in OURS:
        assert optimizer.skipped.item() == 4


# Static scaling


def scales_after(scaler: GradScaler, optimizer: Optimizer, bad: str) -> list[float]:
    """The scale after each step; "x" is one that overflows, and changes nothing."""
    (p,) = optimizer.param_groups[0]["params"]
    seen = []
    for letter in bad:
        before = p.detach().clone()
        iterate(scaler, optimizer, p, *([INF] if letter == "x" else []))
        assert torch.equal(p, before) == (letter == "x")
        seen.append(scaler.get_scale())
    return seen


@every_optimizer
def test_a_static_scale_stays_and_skips(make: Make) -> None:
    scaler = GradScaler(init_scale=128.0, growth_interval=None, min_scale=256.0, hysteresis=2)
    optimizer = make([param(4)])
    assert scales_after(scaler, optimizer, ".xxx..") == [128.0] * 6
    assert [scaler.skipped.item(), scaler.applied_steps.item()] == [3, 3]
    scaler.update(64)
    assert scaler.get_scale() == 64.0


def test_static_and_dynamic_can_be_exchanged() -> None:
    optimizer, scaler = our_sgd([param(4)]), GradScaler(init_scale=128.0, growth_interval=None)
    scaler.set_growth_interval(2)
    assert scales_after(scaler, optimizer, "..x.") == [128, 256, 128, 128]
    scaler.set_growth_interval(None)
    assert scales_after(scaler, optimizer, "..x.") == [128] * 4


def test_static_scales_between_torch_and_ours() -> None:
    optimizer = torch_plain([param(4)])
    static = GradScaler(init_scale=128.0, growth_interval=None)
    scales_after(static, optimizer, "...")
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(static.state_dict())
    assert scales_after(theirs, optimizer, "....") == [128] * 4  # torch's way to be static
    for mine, state, expected in (
        (GradScaler(growth_interval=1), static, [128, 128, 128]),
        (static, torch.amp.GradScaler("cpu", 32.0, growth_interval=1), [32, 32, 32]),
        (static, GradScaler(init_scale=32.0, growth_interval=1), [64, 128, 64]),
    ):
        mine.load_state_dict(state.state_dict())
        assert scales_after(mine, optimizer, "..x") == expected


# FP32 gradients of 16-bit params


@every_way
@with_optimizers(our_adamw, our_sgd, our_clipping_adamw)
def test_main_grad(make: Make, explicit: bool) -> None:
    """It is read, unscaled and reported in place of `grad`, whatever that holds."""
    for dtype in (torch.bfloat16, torch.float16):
        p, q = param(5, dtype=dtype), param(5, dtype=dtype)
        optimizer, scaler = make([p, q]), GradScaler(init_scale=2.0**12)
        q.grad_dtype = torch.float32
        for i in range(4):
            grad = normal((5,), torch.float32, seed=i) * 2.0**12
            grad[0], grad[1], grad[4] = 0.0, 1e-40, NAN if i == 2 else 1.0
            p.main_grad, p.grad, q.grad = grad.clone(), torch.full_like(p, NAN), grad.clone()
            before, scale = p.detach().clone(), scaler.get_scale()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # unscaling in FP32 loses nothing
                scaler.scale(torch.zeros(()))
                if explicit:
                    scaler.unscale_(optimizer)
                    for each in (p.main_grad, q.grad):
                        assert torch.equal(each.nan_to_num(7.0), (grad / scale).nan_to_num(7.0))
                scaler.step(optimizer)
            scaler.update()
            assert torch.equal(p, before) == (i == 2)
            assert torch.equal(p, q)
            assert [each[1:] for each in scaler.underflow_report()] == [(5, 1, 1)] * 2
        assert [each[1:] for each in scaler.overflow_report()] == [(5, 0, 1)] * 2
        assert scaler.skipped.item() == 1
        assert torch.equal(optimizer.state[p]["master"], optimizer.state[q]["master"])


@every_way
@with_optimizers(torch_plain, torch_fused)
def test_torchs_optimizers_have_no_main_grad(make: Make, explicit: bool) -> None:
    """They use `grad`, and so it is `grad` that must be unscaled and looked at."""
    for bad in ([], [NAN]):
        p, q = param(4), param(4)
        first, second = make([p]), make([q])
        p.main_grad = torch.zeros(4)
        for each, optimizer in ((p, first), (q, second)):
            each.grad = filled((4,), *bad) * 2.0**16
            step(GradScaler(), optimizer, explicit)
        assert torch.equal(p, q)
        assert p.isfinite().all()


# Copies
