"""sgd_, lion_ and muon_direction_: operation by operation, bit for bit, against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import independent as ind
import numpy as np
import pytest
import torch
from cases import LARGE, WIDE, for_each, random_bits
from test_adamw import (
    KINDS,
    RANDOM,
    Lists,
    all_shapes,
    as_tensors,
    check_results,
    for_numpy,
    master_of,
    patterns,
    real_of,
)

from mixprec.ops import lion_, muon_direction_, sgd_


class Rule(NamedTuple):
    op: Callable[..., None]
    state: str
    formula: Callable[..., Any]
    numbers: dict[str, Any]
    settings: list[dict[str, Any]]

    def __str__(self) -> str:
        return self.op.__name__


FROM_GRAD = {"inv_scale": 2.0**-5, "clip": 0.7, "max_value": 0.02, "maximize": True}
LION = Rule(
    lion_, "exp_avgs", ind.lion, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    [{}, {"weight_decay": 0.0, **FROM_GRAD},
     {"beta1": 0.0, "beta2": 0.5, "lr": torch.tensor([0.3], dtype=torch.float64)}],
)  # fmt: skip
SGD = Rule(
    sgd_, "momentum_buffers", ind.sgd,
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-2, "nesterov": False},
    [{}, {"momentum": 0.0}, {"dampening": 0.3}, {"nesterov": True, "weight_decay": 0.0},
     {"momentum": 0.0, "weight_decay": 0.0, "lr": torch.tensor([0.3], dtype=torch.float64)},
     {"nesterov": True, **FROM_GRAD}],
)  # fmt: skip
MUON = Rule(
    muon_direction_, "momentum_buffers", ind.muon_direction,
    {"lr": 0.0, "momentum": 0.95, "nesterov": True},
    [{}, {"nesterov": False, **FROM_GRAD}, {"momentum": 0.3}],
)  # fmt: skip
each = pytest.mark.parametrize("rule", [SGD, LION, MUON], ids=str)


def keeps(rule: Rule, hyper: dict[str, Any]) -> bool:
    return rule is not SGD or hyper["momentum"] != 0


def call(rule: Rule, lists: Lists, settings: dict[str, Any]) -> None:
    hyper = as_tensors(rule.numbers | settings)
    states = lists.exp_avgs if keeps(rule, hyper) else []
    rule.op(lists.params, lists.grads, states, lists.masters, lists.steps, **hyper)


def check(rule: Rule, lists: Lists, settings: dict[str, Any]) -> None:
    """One call, and every bit of params, states, masters and steps against NumPy."""
    hyper, want = rule.numbers | settings, []
    for i, param in enumerate(lists.params):
        old = ind.values(lists.exp_avgs[i]) if keeps(rule, hyper) else None
        arrays = (ind.values(master_of(lists, i)), ind.values(lists.grads[i]), old)
        step, real = int(lists.steps[i].item()) + 1, real_of(param)
        want.append(rule.formula(*arrays, step, real=real, **for_numpy(hyper)))
    before, untouched = lists.steps.clone(), [ind.bits(b).copy() for b in lists.exp_avgs]
    call(rule, lists, settings)
    assert torch.equal(lists.steps, before + 1)
    for i, (p, m) in enumerate(want):
        state = lists.exp_avgs[i]
        check_results(lists, i, p, [] if m is None else [(state, m)], hyper)
        if m is None:
            assert np.array_equal(ind.bits(state), untouched[i]), "there was no momentum"


@each
@pytest.mark.parametrize("part", range(3))
def test_every_dtype_mix(backend: str, rule: Rule, part: int) -> None:
    """One or two of the settings for each mix, twice."""
    for k, (param, grad, master) in enumerate(KINDS[part::3]):
        for settings in rule.settings[(k + part) % 3 :: 3]:
            lists = all_shapes(param, (grad,), master=master)
            for _ in range(2):
                check(rule, lists, settings)


@each
@pytest.mark.parametrize(("param", "master", "moments", "stochastic"), RANDOM, ids=str)
def test_layouts_and_random_rounding(
    backend: str, rule: Rule, param: torch.dtype, master: Any, moments: torch.dtype,
    stochastic: bool,
) -> None:  # fmt: skip
    lists = all_shapes(param, (param,), master=master, moments=moments)
    random = {"indices": list(range(len(lists.params))), "stochastic_rounding": stochastic}
    check(rule, lists, {"seed": 2**40 + 1, **random})
    if rule is SGD:
        check(rule, lists, {"momentum": 0.0, **random})


@each
def test_large(two_threads: None, rule: Rule) -> None:
    lists = Lists()
    for i, shape in enumerate(LARGE):
        lists.add(shape, torch.bfloat16, master=True, step=i, seed=i)
    check(rule, lists, {})


@each
def test_extreme_values(backend: str, rule: Rule) -> None:
    for dtype in (*WIDE, torch.float64):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        lists = Lists()
        lists.add((20_000,), dtype, step=4)
        for seed, t in enumerate((lists.params[0], lists.grads[0], lists.exp_avgs[0])):
            t.copy_(random_bits(20_000, dtype if seed < 2 else real, seed))
        check(rule, lists, {"inv_scale": 2.0**20})
        check(rule, lists, {"max_value": 1.0})


@for_each("rule", [SGD, LION])
def test_no_decay_leaves_an_infinite_param_alone(backend: str, rule: Rule) -> None:
    lists = Lists()
    lists.add((3,))
    lists.params[0].copy_(torch.tensor([1.0, -math.inf, -0.0]))
    lists.grads[0].copy_(torch.tensor([1.0, 0.0, 0.0]))
    check(rule, lists, {"weight_decay": 0.0})
    assert lists.params[0][1] == -math.inf


def test_sign(backend: str) -> None:
    """Of 0 it is 0, of -0 too, of NaN NaN."""
    lists = Lists()
    lists.add((5,))
    lists.params[0].copy_(torch.tensor([1.0, -0.0, 2.0, -math.inf, 3.0]))
    lists.grads[0].copy_(torch.tensor([0.0, -0.0, math.nan, 1.0, -1e-45]))
    lists.exp_avgs[0].copy_(torch.tensor([0.0, -0.0, 0.0, 0.0, -1e-45]))
    call(LION, lists, {"lr": 0.5, "weight_decay": 0.0})
    got = lists.params[0]
    want = torch.tensor([1.0, -0.0, math.nan, -math.inf, 3.5])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got[1].signbit()


@each
@for_each("flag", [1.0, 2.0, math.nan])
def test_found_inf_skips_everything(backend: str, rule: Rule, flag: float) -> None:
    lists = Lists()
    for i, master in enumerate([True, "remainder"]):
        lists.add((5, 7), torch.bfloat16, master=master, moments=torch.bfloat16, step=i, seed=i)
    before = [patterns(t).copy() for t in lists.all()]
    call(rule, lists, {"found_inf": flag, "indices": [0, 1]})
    for got, want in zip(lists.all(), before, strict=True):
        assert np.array_equal(patterns(got), want), "a skipped step wrote"


T, META = torch.ones(3), torch.ones(3, device="meta")


@each
@for_each(
    "changes, error, message",
    [
        ({"params": T}, TypeError, "params must be a list of tensors, got Tensor"),
        ({"params": [T.clone().requires_grad_()]}, RuntimeError, "no derivative"),
        ({"grads": [T[:2]]}, ValueError, r"grads\[0\] must have shape"),
        (
            {"state": [T, T]},
            ValueError,
            "(exp_avgs|momentum_buffers) must have one tensor per param",
        ),
        ({"state": [T.half()]}, ValueError, r"\[0\] must have dtype"),
        ({"masters": [T.half()]}, ValueError, r"masters\[0\] must have dtype"),
        ({"state": [T.bfloat16()]}, ValueError, "(exp_avgs|momentum_buffers).*with indices"),
        ({"steps": torch.zeros(2)}, ValueError, "steps must have shape"),
        ({"clip": META[:1]}, ValueError, "clip must be on"),
        ({"max_value": -1.0}, ValueError, "max_value must be positive"),
        ({"found_inf": True}, TypeError, "found_inf must be a torch.Tensor, got bool"),
    ],
)
def test_bad_input(rule: Rule, changes: dict, error: type[Exception], message: str) -> None:
    given = {"params": [T.clone()], "grads": [T.clone()], "state": [T.clone()], "masters": []}
    given |= {"steps": torch.zeros(1), **rule.numbers, **changes}
    given[rule.state] = given.pop("state")
    with pytest.raises(error, match=f"^{rule.op.__name__}: .*{message}"):
        rule.op(**given)
    assert torch.equal(T, torch.ones(3))
