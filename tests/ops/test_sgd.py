"""sgd_: operation by operation, bit for bit, against an FP32 step written in NumPy."""

from __future__ import annotations

import math
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import LARGE, WIDE, for_each, normal, random_bits
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

from mixprec.ops import sgd_

HYPER = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-2, "nesterov": False}
SETTINGS = [
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 0.0, "lr": torch.tensor([0.3], dtype=torch.float64)},
    {},
    {"dampening": 0.3},
    {"nesterov": True, "weight_decay": 0.0},
    {"nesterov": True, "inv_scale": 2.0**-5, "clip": 0.7, "max_value": 0.02, "maximize": True},
]


def call(lists: Lists, settings: dict[str, Any]) -> None:
    hyper = as_tensors(HYPER | settings)
    buffers = lists.exp_avgs if hyper["momentum"] else []
    sgd_(lists.params, lists.grads, buffers, lists.masters, lists.steps, **hyper)


def check(lists: Lists, settings: dict[str, Any]) -> None:
    """One call, and every bit of params, buffers, masters and steps against NumPy."""
    hyper, want = HYPER | settings, []
    for i, param in enumerate(lists.params):
        old = ind.values(lists.exp_avgs[i]) if hyper["momentum"] else None
        step, real = int(lists.steps[i].item()) + 1, real_of(param)
        arrays = (ind.values(master_of(lists, i)), ind.values(lists.grads[i]), old)
        want.append(ind.sgd(*arrays, step, real=real, **for_numpy(hyper)))
    before, untouched = lists.steps.clone(), [ind.bits(b).copy() for b in lists.exp_avgs]
    call(lists, settings)
    assert torch.equal(lists.steps, before + 1)
    for i, (p, b) in enumerate(want):
        buffer = lists.exp_avgs[i]
        check_results(lists, i, p, [] if b is None else [(buffer, b)], hyper)
        if b is None:
            assert np.array_equal(ind.bits(buffer), untouched[i]), "there was no momentum"


@pytest.mark.parametrize("start", range(3))
def test_every_dtype_mix(backend: str, start: int) -> None:
    """Two of the six settings for each mix."""
    for k, (param, grad, master) in enumerate(KINDS):
        for settings in SETTINGS[(start + k) % 3 :: 3] if k % 3 == start else ():
            lists = all_shapes(param, (grad,), master=master)
            check(lists, settings)
            check(lists, settings)


@pytest.mark.parametrize(("param", "master", "moments", "stochastic"), RANDOM, ids=str)
def test_layouts_and_random_rounding(
    backend: str, param: torch.dtype, master: bool | str, moments: torch.dtype, stochastic: bool
) -> None:
    lists = all_shapes(param, (param,), master=master, moments=moments)
    random = {"indices": list(range(len(lists.params))), "stochastic_rounding": stochastic}
    check(lists, {"seed": 2**40 + 1, "nesterov": True, **random})
    check(lists, {"momentum": 0.0, **random})


def test_large(two_threads: None) -> None:
    lists = Lists()
    for i, shape in enumerate(LARGE):
        lists.add(shape, torch.bfloat16, master=True, step=i, seed=i)
    check(lists, {"nesterov": True})


def test_extreme_values(backend: str) -> None:
    for dtype in (*WIDE, torch.float64):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        lists = Lists()
        lists.add((20_000,), dtype, step=4)
        lists.params[0].copy_(random_bits(20_000, dtype, 1))
        lists.grads[0].copy_(random_bits(20_000, dtype, 2))
        lists.exp_avgs[0].copy_(random_bits(20_000, real, 3))
        check(lists, {"inv_scale": 2.0**20})
        check(lists, {"max_value": 1.0, "weight_decay": 0.0})


def test_no_decay_leaves_an_infinite_param_alone(backend: str) -> None:
    lists = Lists()
    lists.add((3,))
    lists.params[0].copy_(torch.tensor([1.0, -math.inf, -0.0]))
    lists.grads[0].copy_(torch.tensor([1.0, 0.0, 0.0]))
    check(lists, {"weight_decay": 0.0})
    assert lists.params[0][1] == -math.inf


@for_each("flag", [1.0, 2.0, math.nan])
def test_found_inf_skips_everything(backend: str, flag: float) -> None:
    lists = Lists()
    for i, master in enumerate([True, "remainder"]):
        lists.add((5, 7), torch.bfloat16, master=master, moments=torch.bfloat16, step=i, seed=i)
    before = [patterns(t).copy() for t in lists.all()]
    call(lists, {"found_inf": flag, "indices": [0, 1]})
    for got, want in zip(lists.all(), before, strict=True):
        assert np.array_equal(patterns(got), want), "a skipped step wrote"


@for_each(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
    ],
)
@for_each("dtype", [torch.float32, torch.float64])
def test_agrees_with_torch_sgd(backend: str, dtype: torch.dtype, settings: dict) -> None:
    ours, theirs = normal((500,), dtype), normal((500,), dtype).requires_grad_()
    buffers = [torch.zeros_like(ours)] if "momentum" in settings else []
    steps = torch.zeros(1)
    reference = torch.optim.SGD([theirs], lr=0.01, foreach=False, **settings)
    for i in range(20):
        theirs.grad = normal((500,), dtype, seed=i + 1)
        reference.step()
        sgd_([ours], [theirs.grad], buffers, [], steps, lr=0.01, **settings)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs.detach(), rtol=32 * unit, atol=8 * unit)
    assert steps.item() == 20


T, META = torch.ones(3), torch.ones(3, device="meta")


@for_each(
    "changes, error, message",
    [
        ({"params": T}, TypeError, "params must be a list of tensors, got Tensor"),
        ({"params": [T.clone().requires_grad_()]}, RuntimeError, "no derivative"),
        ({"grads": [T[:2]]}, ValueError, r"grads\[0\] must have shape"),
        ({"momentum_buffers": [T, T]}, ValueError, "momentum_buffers must have one tensor"),
        ({"momentum_buffers": [T.half()]}, ValueError, r"momentum_buffers\[0\] must have dtype"),
        ({"momentum_buffers": [T.bfloat16()]}, ValueError, "momentum_buffers.*with indices"),
        ({"masters": [T.half()]}, ValueError, r"masters\[0\] must have dtype"),
        ({"steps": torch.zeros(2)}, ValueError, "steps must have shape"),
        ({"lr": META[:1]}, ValueError, "lr_tensor must be on"),
        ({"max_value": -1.0}, ValueError, "max_value must be positive"),
        ({"found_inf": True}, TypeError, "found_inf must be a torch.Tensor, got bool"),
    ],
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    lists = {"params": [T.clone()], "grads": [T.clone()], "momentum_buffers": [], "masters": []}
    with pytest.raises(error, match=f"^sgd_: .*{message}"):
        sgd_(**({**lists, "steps": torch.zeros(1), "lr": 0.1} | changes))
    assert torch.equal(lists["params"][0], T)
