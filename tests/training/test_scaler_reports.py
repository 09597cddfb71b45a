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

import numpy as np
import pytest
import torch
from cases import name, normal, random_bits
from hypothesis import given
from hypothesis import strategies as st
from optimizers import (
    OURS,
    Make,
    every_optimizer,
    every_way,
    our_adamw,
    our_sgd,
    through_a_file,
    torch_fused,
    torch_plain,
    torch_sgd,
)
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.grad_report import Overflow, Underflow
from mixprec.optim import AdamW

Optimizer = torch.optim.Optimizer
INF, NAN = math.inf, math.nan


def our_clipping_adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.1, max_grad_norm=1.0)


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
    p.grad = filled((6,), 1e37)
    step(scaler, optimizer, explicit)
    assert torch.equal(p, torch.ones(6))
    assert (scaler.skipped.item(), scaler.get_scale()) == (2, 2.0**-12)


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
    b.grad = filled((3,), NAN)
    step(scaler, optimizer, explicit)
    found = Overflow("param_groups[0]['params'][1] of shape (3,)", 3, 0, 1)
    assert scaler.overflow_report() == [found]
    b.grad, a.grad = None, filled((2,))  # an expert that was not chosen, say
    step(scaler, optimizer, explicit)
    assert scaler.overflow_report() == [found]
    a.grad = None
    optimizer.add_param_group({"params": [late]})
    b.grad, late.grad = filled((3,)), filled((4,))
    step(scaler, optimizer, explicit)
    assert scaler.overflow_report() == [found]
    late.grad = filled((4,), INF, NAN)
    step(scaler, optimizer, explicit)
    added = Overflow("param_groups[1]['params'][0] of shape (4,)", 4, 1, 1)
    assert scaler.overflow_report() == [added]
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


def bits_of(t: torch.Tensor) -> tuple[np.ndarray, int, int]:
    """The bits of a 16- or 32-bit float, without the sign; those of its smallest normal, of Inf."""
    kind = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[t.element_size()]
    normal_, inf = {
        torch.float32: (0x00800000, 0x7F800000),
        torch.bfloat16: (0x0080, 0x7F80),
        torch.float16: (0x0400, 0x7C00),
    }[t.dtype]
    return t.view(kind[0]).numpy() & kind[1], normal_, inf


@every_way
@pytest.mark.parametrize("make", [torch_plain, torch_fused, our_adamw, our_sgd], ids=name)
@given(seed=st.integers(0, 1000), size=st.integers(1, 600), kind=st.integers(0, 2))
def test_all_counts_against_the_bits(
    make: Make, explicit: bool, seed: int, size: int, kind: int
) -> None:
    """Every exponent as often as any other; half of them zeros and subnormals."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16 if make in OURS else None)
    dtype = dtypes[kind] or torch.float32
    p = param(size, dtype=dtype)
    optimizer, scaler = make([p]), GradScaler(init_scale=1.0)
    grad = random_bits(size, dtype, seed)
    tiny = torch.finfo(dtype).smallest_normal
    grad[::4] *= 0.0
    grad[::4].nan_to_num_(0.0)
    grad[1::4] = (normal((len(grad[1::4]),), torch.float32, seed).double() * tiny).to(dtype)
    bits, smallest_normal, inf = bits_of(grad)
    p.grad = grad.clone()
    step(scaler, optimizer, explicit)
    (found,) = scaler.underflow_report()
    assert found[1:] == (size, (bits == 0).sum(), ((bits > 0) & (bits < smallest_normal)).sum())
    infs, nans = (bits == inf).sum(), (bits > inf).sum()
    assert [each[1:] for each in scaler.overflow_report()] == [(size, infs, nans)] * bool(
        infs + nans
    )
    assert scaler.skipped.item() == (infs + nans > 0)


@every_way
def test_underflow_is_of_the_last_step_and_of_scaled_gradients(explicit: bool) -> None:
    """5 values that are subnormal in fp16 until the scale has grown 2^4 times."""
    p = param(8, dtype=torch.float16)
    optimizer, scaler = our_adamw([p]), GradScaler(init_scale=2.0**4, growth_interval=1)
    values = torch.tensor([0.0, -0.0, 1.0] + [-(2.0**-22)] * 5)
    for _ in range(5):
        p.grad = (values * scaler.get_scale()).half()
        expected = int((p.grad[3:].abs() < 2.0**-14).sum())
        step(scaler, optimizer, explicit)
        (found,) = scaler.underflow_report()
        assert found[1:] == (8, 2, expected)
        assert found.share == expected / 6
    assert scaler.get_scale() == 2.0**9
    assert found == Underflow("param_groups[0]['params'][0] of shape (8,)", 8, 2, 0)
    assert str(found).endswith(": 25.0% zeros, 0.0% of the rest subnormal")
    assert Underflow("x", 0, 0, 0).share == Underflow("x", 3, 3, 0).share == 0.0


# Early growth


def scales(scaler: GradScaler, optimizer: Optimizer, p: torch.Tensor, grads: list) -> list[float]:
    seen = []
    for grad in grads:
        p.grad = grad.clone()
        step(scaler, optimizer)
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize("make", [our_adamw, our_sgd, torch_fused, torch_plain], ids=name)
def test_early_growth(make: Make) -> None:
    """After a twentieth of the interval, here 3 updates, if more than a quarter is subnormal."""
    dtype = torch.float16 if make in OURS else torch.float32
    tiny = torch.finfo(dtype).smallest_normal / 4
    settings: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 60}
    zeros = filled((8,), 0.0, 0.0, 0.0, 0.0, dtype=dtype)
    quarter, more = zeros.clone(), zeros.clone()
    quarter[4], more[4:6] = tiny, -tiny
    for grad, threshold, factor in (
        (more, 0.25, 2.0),
        (more, 0.5, 1.0),  # not more than that
        (quarter, 0.25, 1.0),
        (quarter, 0.0, 2.0),
        (zeros, 0.0, 1.0),  # zeros are no underflow
        (more, None, 1.0),
        (torch.full((8,), tiny, dtype=dtype), 1.0, 1.0),
        (torch.full((8,), tiny, dtype=dtype), 0.99, 2.0),
    ):
        p = param(8, dtype=dtype)
        scaler = GradScaler(**settings, grow_on_underflow=threshold)
        seen = scales(scaler, make([p]), p, [grad] * 7)
        assert seen == [1, 1, factor, factor, factor, factor**2, factor**2], (grad, threshold)
    bad = filled((8,), INF, *[tiny] * 6, dtype=dtype)
    scaler, p = GradScaler(**settings, grow_on_underflow=0.25), param(8, dtype=dtype)
    seen = scales(scaler, make([p]), p, [more, more, bad, more, more, more])
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1]  # an overflow starts the count anew
    fine = torch.ones(8, dtype=dtype)
    scaler, p = GradScaler(**settings, grow_on_underflow=0.25), param(8, dtype=dtype)
    seen = scales(scaler, make([p]), p, [fine] * 9 + [more] + [fine] * 60)
    assert seen == [1] * 9 + [2] * 60 + [4]  # at once if the twentieth is over; then as ever


def test_early_growth_obeys_the_ceiling_static_scales_and_short_intervals() -> None:
    more = torch.full((4,), 1e-7, dtype=torch.float16)
    for settings, expected in (
        ({"growth_interval": 20, "max_scale": 4.0}, [2, 4, 4, 4]),
        ({"growth_interval": 1}, [2, 4, 8, 16]),
        ({"growth_interval": 60}, [1, 1, 2, 2]),
        ({"growth_interval": 61}, [1, 1, 1, 2]),
        ({"growth_interval": None}, [1, 1, 1, 1]),
    ):
        p = param(4, dtype=torch.float16)
        scaler = GradScaler(init_scale=1.0, grow_on_underflow=0.5, **settings)
        assert scales(scaler, our_adamw([p]), p, [more] * 4) == expected, settings


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
    raised = []
    for i in range(1, 14):
        if i == 8:
            model.spoil()
        else:
            model.spoil(weight=(INF,) * 6, head=(NAN, INF))
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        before = scaler.get_scale()
        try:
            scaler.update()
        except RuntimeError as error:
            raised.append((i, str(error)))
        assert scaler.get_scale() == before * (1 if i == 8 else 0.5)  # in any case
    # Again after as many more; a good step starts the count anew.
    assert [i for i, _ in raised] == [3, 6, 11]
    assert raised[0][1].startswith(
        "GradScaler: the last 3 updates were all skipped (max_consecutive_skips=3); the loss scale "
        "is 8192. Worst: head.weight: 1 NaN and 1 Inf among 4."
    )
    assert raised[1][1].startswith("GradScaler: the last 6 updates were all skipped")
    assert scaler.skipped.item() == 12


@every_optimizer
def test_the_callback_after_many_skips_gets_the_report(make: Make) -> None:
    p = param(4)
    optimizer, calls = make([("weight", p)]), []
    scaler = GradScaler(max_consecutive_skips=2, on_max_skips=calls.append)
    for bad in ([INF], [NAN], [], [INF], [INF, NAN], [INF], [INF], [INF], [], [NAN], [NAN]):
        iterate(scaler, optimizer, p, *bad)
    assert calls == [
        [Overflow("weight", 4, 0, 1)],
        [Overflow("weight", 4, 1, 1)],
        [Overflow("weight", 4, 1, 0)],
        [Overflow("weight", 4, 0, 1)],
    ]


class StopTraining(Exception):
    pass


def stop(report: list[Overflow]) -> None:
    raise StopTraining(report[0].name)


def test_what_the_callback_raises_arrives() -> None:
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
    flags = scaler._found_inf_per_device(optimizer)
    for flag in flags.values():
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


def loaded(state: dict) -> GradScaler:
    scaler = GradScaler(max_consecutive_skips=3)
    scaler.load_state_dict(through_a_file(state))
    return scaler


@pytest.mark.parametrize("way", COPIES)
def test_skips_in_a_row_are_counted_across_copies(way: str) -> None:
    """A run that was saved and resumed raises when, and what, it raises uninterrupted."""
    for after in range(7):
        raised = []
        for resumes in (False, True):
            p = param(4)
            optimizer, scaler = our_adamw([p]), GradScaler(max_consecutive_skips=3)
            for i in range(1, 10):
                p.grad = filled((4,), NAN)
                try:
                    step(scaler, optimizer)
                except RuntimeError as error:
                    raised.append((i, str(error)))
                if resumes and i == after + 1:
                    before, scaler = scaler, COPIES[way](scaler)
                    assert scaler.last_step_skipped == before.last_step_skipped
        assert [i for i, _ in raised] == [3, 6, 9] * 2
        assert raised[:3] == raised[3:]


# Counters


@every_way
@every_optimizer
def test_counters(make: Make, explicit: bool) -> None:
    p = param(4)
    optimizer, scaler = make([p]), GradScaler()
    assert scaler.skipped.item() == scaler.applied_steps.item() == 0
    assert not scaler.last_step_skipped
    kept, skipped, applied = scaler.applied_steps, 0, 0
    for bad in ([], [INF], [NAN], [], [INF], []):
        before = scaler.skipped, scaler.applied_steps
        p.grad = filled((4,), *bad)
        step(scaler, optimizer, explicit)
        assert [t.item() for t in before] == [skipped, applied]  # not written in place
        skipped, applied = skipped + len(bad), applied + (not bad)
        assert scaler.skipped.dtype == scaler.applied_steps.dtype == torch.int64
        assert scaler.skipped.shape == scaler.applied_steps.shape == ()
        assert [scaler.skipped.item(), scaler.applied_steps.item()] == [skipped, applied]
        assert scaler.last_step_skipped == bool(bad)
        assert scaler.state_dict()["skipped_in_a_row"] == (2 if bad == [NAN] else len(bad))
    assert kept.item() == 0
    counts = scaler.state_dict()
    p.grad = filled((4,), INF)
    scaler.step(optimizer)
    scaler.update(2.0**16)  # a scale set by hand: not an update that says how the step went
    assert scaler.state_dict() | {"scale": 0} == counts | {"scale": 0}
    other = GradScaler()
    other.load_state_dict(counts)
    assert [other.skipped.item(), other.applied_steps.item()] == [3, 3]
    if make in OURS:
        assert optimizer.skipped.item() == 4


# Static scaling


@every_optimizer
def test_a_static_scale_stays_and_skips(make: Make) -> None:
    p = param(4)
    optimizer = make([p])
    scaler = GradScaler(init_scale=128.0, growth_interval=None, min_scale=256.0, hysteresis=2)
    for bad in ([], [INF], [NAN], [INF], [], []):
        before = p.detach().clone()
        iterate(scaler, optimizer, p, *bad)
        assert torch.equal(p, before) == bool(bad)
        assert scaler.get_scale() == 128.0
    assert [scaler.skipped.item(), scaler.applied_steps.item()] == [3, 3]
    scaler.update(64)
    assert scaler.get_scale() == 64.0


def test_static_and_dynamic_can_be_exchanged() -> None:
    p = param(4)
    optimizer = our_sgd([p])
    scaler = GradScaler(init_scale=128.0, growth_interval=None)

    def after(bad: list[float]) -> float:
        iterate(scaler, optimizer, p, *bad)
        return scaler.get_scale()

    scaler.set_growth_interval(2)
    assert [after(bad) for bad in ([], [], [INF], [])] == [128, 256, 128, 128]
    scaler.set_growth_interval(None)
    assert [after(bad) for bad in ([], [], [INF], [])] == [128] * 4


def test_static_scales_between_torch_and_ours() -> None:
    p = param(4)
    optimizer = torch_plain([p])
    static = GradScaler(init_scale=128.0, growth_interval=None)
    for _ in range(3):
        iterate(static, optimizer, p)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(static.state_dict())
    for _ in range(5):
        iterate(theirs, optimizer, p)  # type: ignore[arg-type]
    assert theirs.get_scale() == 128.0  # never grows: torch knows no other way to be static
    dynamic = GradScaler(growth_interval=1)
    dynamic.load_state_dict(static.state_dict())
    back = GradScaler(growth_interval=None)
    back.load_state_dict(torch.amp.GradScaler("cpu", 32.0, growth_interval=1).state_dict())
    again = GradScaler(growth_interval=None)
    again.load_state_dict(GradScaler(init_scale=32.0, growth_interval=1).state_dict())
    for scaler, expected in ((dynamic, [128.0] * 3), (back, [32.0] * 3), (again, [64.0, 128, 64])):
        seen = []
        for bad in ([], [], [INF]):
            iterate(scaler, optimizer, p, *bad)
            seen.append(scaler.get_scale())
        assert seen == expected


# FP32 gradients of 16-bit params


@every_way
@pytest.mark.parametrize("make", [our_adamw, our_sgd, our_clipping_adamw], ids=name)
def test_main_grad(make: Make, explicit: bool) -> None:
    """It is read, unscaled and reported in place of `grad`, whatever that holds."""
    for dtype in (torch.bfloat16, torch.float16):
        p, q = param(5, dtype=dtype), param(5, dtype=dtype)
        optimizer, scaler = make([p, q]), GradScaler(init_scale=2.0**12)
        q.grad_dtype = torch.float32
        for i in range(4):
            grad = normal((5,), torch.float32, seed=i) * 2.0**12
            grad[0], grad[1] = 0.0, 1e-40
            grad[4] = NAN if i == 2 else 1.0
            p.main_grad, p.grad, q.grad = grad.clone(), torch.full_like(p, NAN), grad.clone()
            before, scale = p.detach().clone(), scaler.get_scale()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # unscaling in FP32 loses nothing
                scaler.scale(torch.zeros(()))
                if explicit:
                    scaler.unscale_(optimizer)
                    want = (grad / scale).nan_to_num(7.0)
                    assert torch.equal(p.main_grad.nan_to_num(7.0), want)
                    assert torch.equal(q.grad.nan_to_num(7.0), want)
                scaler.step(optimizer)
            scaler.update()
            assert torch.equal(p, before) == (i == 2)
            assert torch.equal(p, q)
            assert [each[1:] for each in scaler.underflow_report()] == [(5, 1, 1)] * 2
        assert [each[1:] for each in scaler.overflow_report()] == [(5, 0, 1)] * 2
        assert scaler.skipped.item() == 1
        assert torch.equal(optimizer.state[p]["master"], optimizer.state[q]["master"])


@every_way
@pytest.mark.parametrize("make", [torch_plain, torch_fused], ids=name)
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


def through_pickle(run: tuple) -> tuple:
    return pickle.loads(pickle.dumps(run))


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [our_adamw, our_sgd, our_clipping_adamw, torch_fused], ids=name)
def test_copies_of_a_run_go_on_identically(make: Make, clone: Callable) -> None:
    dtype = torch.float32 if make is torch_fused else torch.bfloat16
    model = Model(dtype)
    settings = {"hysteresis": 2, "max_scale": 2.0**12, "grow_on_underflow": 0.0}
    scaler = GradScaler(init_scale=2.0**8, growth_interval=40, **settings)
    runs = [(model, make(model.parameters()), scaler)]

    def advance(run: tuple, i: int) -> None:
        model, optimizer, scaler = run
        for k, p in enumerate(model.parameters()):
            p.grad = normal(tuple(p.shape), dtype, seed=10 * i + k)
            p.grad.view(-1)[0] = INF if i % 5 == 3 else 1e-39
        step(scaler, optimizer, explicit=i % 2 == 0)

    for i in range(6):
        advance(runs[0], i)
    runs.append(clone(runs[0]))
    for i in range(6, 20):
        for run in runs:
            advance(run, i)
        (model, optimizer, scaler), (other, others_optimizer, others_scaler) = runs
        assert scaler.state_dict() == others_scaler.state_dict()
        assert scaler.last_step_skipped == others_scaler.last_step_skipped == (i % 5 == 3)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p is not q
            assert torch.equal(p, q)
            a, b = optimizer.state[p], others_optimizer.state[q]
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert scaler.get_scale() != 2.0**8
    assert scaler.overflow_report() == others_scaler.overflow_report() != []
