"""What a GradScaler reports: which gradients overflowed or underflowed, FP32 ones among them."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from cases import normal
from scalers import (
    INF,
    NAN,
    OURS,
    TORCHS,
    Make,
    Optimizer,
    every_optimizer,
    every_way,
    filled,
    iterate,
    our_adamw,
    our_clipping_adamw,
    our_sgd,
    param,
    step,
    torch_fused,
    torch_plain,
    torch_sgd,
    with_optimizers,
)
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.grad_report import Overflow, Underflow

pytestmark = pytest.mark.usefixtures("flags")


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
        assert copy.copy(scaler).overflow_report() == []
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
    iterate(scaler, optimizer, 1e37, -1e37, NAN, INF, 1e30, explicit=explicit)
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


@every_optimizer
def test_the_error_after_many_skips_names_the_worst_parameter(make: Make) -> None:
    """And again after as many more. (test_a_copied_scaler_... has good steps between.)"""
    model = Model()
    optimizer = make(model.parameters())
    scaler = GradScaler(max_consecutive_skips=3, model=model)
    for last, scale in ((3, 8192), (6, 1024)):
        message = (
            rf"^GradScaler: the last {last} updates were all skipped \(max_consecutive_skips=3\); "
            rf"the loss scale is {scale}. Worst: head.weight: 1 NaN and 1 Inf among 4\."
        )
        for i in (1, 2, 3):
            model.spoil(weight=(INF,) * 6, head=(NAN, INF))
            with pytest.raises(RuntimeError, match=message) if i == 3 else nullcontext():
                step(scaler, optimizer)
    assert scaler.skipped.item() == 6


@every_way
@every_optimizer
def test_underflow_is_of_the_last_step_and_of_scaled_gradients(make: Make, explicit: bool) -> None:
    """5 values that are subnormal until the scale has grown 2^4 times.

    (tests/ops/test_reference_values.py compares the counts of any values with the bits.)
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


@every_way
@with_optimizers(*OURS, our_clipping_adamw)
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
                warnings.filterwarnings("ignore", ".*have a grad beside main_grad")
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
@with_optimizers(*TORCHS)
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
