"""Calls of the optimizers' ops, and what they must hold after one, by a step written in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import Layout, contiguous, normal, transposed

from mixprec.ops import adamw_, lion_, muon_direction_, sgd_
from mixprec.ops._reference.rounding import split_master

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Rule:
    """An op, its lists of states, NumPy's step, its numbers, and settings to vary them."""

    op: Callable[..., None]
    states: tuple[str, ...]
    formula: Callable[..., Any]
    numbers: dict[str, Any]
    settings: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        return self.op.__name__

    def kept(self, hyper: dict[str, Any]) -> int:
        """The number of states in use."""
        return 0 if self.op is sgd_ and hyper["momentum"] == 0 else len(self.states)


RATE = torch.tensor([0.3], dtype=F64)
FROM_GRAD = {"inv_scale": 2.0**-5, "clip": 0.7, "max_value": 0.02, "maximize": True}
ADAMW = Rule(
    adamw_, ("exp_avgs", "exp_avg_sqs"), ind.adamw,
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    ({"inv_scale": 2.0**-9, "clip": 0.7}, {"decoupled_weight_decay": False, "max_value": 0.5},
     {"lr": 0.37, "beta1": 0.0, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.0, "maximize": True},
     {"weight_decay": 0.5}, {"lr": torch.tensor(3e-4)}, {"lr": RATE}, {"lr": 0.0},
     {"decoupled_weight_decay": False, "weight_decay": 0.1}, {"eps": 1e-3},
     {"beta1": 0.95, "beta2": 0.98}, {"inv_scale": 2.0**-16, "clip": 0.9, "maximize": True}),
)  # fmt: skip
LION = Rule(
    lion_, ("exp_avgs",), ind.lion,
    {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    ({"maximize": True}, {"weight_decay": 0.0, **FROM_GRAD},
     {"beta1": 0.0, "beta2": 0.5, "lr": RATE}),
)  # fmt: skip
SGD = Rule(
    sgd_, ("momentum_buffers",), ind.sgd,
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2, "nesterov": False},
    ({"momentum": 0.0}, {"dampening": 0.3}, {"dampening": 0.0, "nesterov": True, **FROM_GRAD},
     {"momentum": 0.0, "weight_decay": 0.0, "lr": RATE},
     {"dampening": 0.0, "nesterov": True, "weight_decay": 0.0}),
)  # fmt: skip
MUON = Rule(
    muon_direction_, ("momentum_buffers",), ind.muon_direction,
    {"lr": 0.0, "momentum": 0.95, "nesterov": True},
    ({"maximize": True}, {"nesterov": False, **FROM_GRAD}, {"momentum": 0.3}),
)  # fmt: skip
RULES = (ADAMW, SGD, LION, MUON)
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
decaying = pytest.mark.parametrize("rule", RULES[:3], ids=str)


@dataclass
class Lists:
    """The tensors of one call. Each param has two states, whatever a rule uses of them."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    states: tuple[list[torch.Tensor], ...] = field(default_factory=lambda: ([], []))
    masters: list[torch.Tensor] = field(default_factory=list)
    steps: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = F32,
        grad_dtype: torch.dtype | None = None,
        *,
        master: bool | str = False,
        moments: torch.dtype | None = None,
        step: int = 0,
        layouts: tuple[Layout, ...] = (contiguous,) * 5,
        seed: int = 0,
    ) -> None:
        """master: False, True for one in fp32, "remainder" for the bits that a bf16 param lacks."""
        real = F64 if dtype == F64 else F32
        exact, old = normal(shape, real, seed), float(step > 0)
        self.params.append(layouts[0](exact.to(dtype)))
        self.grads.append(layouts[1](normal(shape, grad_dtype or dtype, seed + 1)))
        first, second = (normal(shape, real, seed + k) * old for k in (2, 3))
        self.states[0].append(layouts[2](first.to(moments or real)))
        self.states[1].append(layouts[3](second.square().to(moments or real)))
        if master == "remainder":
            param, remainder = split_master(exact)
            self.params[-1] = layouts[0](param)
            # every_second and padded_rows surround it with NaN, which integers have not
            self.masters.append(transposed(remainder))
        elif master:
            self.masters.append(layouts[4](exact))
        self.steps = torch.cat([self.steps, torch.tensor([float(step)])])

    def lists(self) -> tuple[list[torch.Tensor], ...]:
        return self.params, self.grads, *self.states, self.masters

    def all(self) -> list[torch.Tensor]:
        return [*(t for tensors in self.lists() for t in tensors), self.steps]

    def clone(self) -> Lists:
        # torch.clone keeps the strides of dense tensors, which is all that is needed here
        params, grads, m, v, masters = ([t.clone() for t in tensors] for tensors in self.lists())
        return Lists(params, grads, (m, v), masters, self.steps.clone())

    def call(self, rule: Rule, **settings: object) -> None:
        device = ("inv_scale", "clip", "found_inf")
        hyper = rule.numbers | settings
        states = self.states[: rule.kept(hyper)] or [[]]
        hyper = {k: torch.tensor(v, dtype=F32) if k in device else v for k, v in hyper.items()}
        rule.op(self.params, self.grads, *states, self.masters, self.steps, **hyper)

    def value(self, i: int) -> torch.Tensor:
        """What is updated of param i."""
        if not self.masters:
            return self.params[i]
        master = self.masters[i]
        if master.dtype != torch.int16:
            return master
        high = ind.bits(self.params[i]).astype(np.int64) << 16
        code = (high + master.numpy()) & 0xFFFFFFFF
        return torch.from_numpy(np.array(code, np.uint32).view(np.float32))


def patterns(t: torch.Tensor) -> np.ndarray:
    return t.numpy() if t.dtype == torch.int16 else ind.bits(t)


def check(rule: Rule, lists: Lists, **settings: object) -> None:
    """One call, and every bit of params, states, masters and steps against NumPy."""
    hyper, want = rule.numbers | settings, []
    left = ("found_inf", "stochastic_rounding", "seed", "indices")
    plain = {k: v for k, v in hyper.items() if k not in left} | {"lr": float(hyper["lr"])}
    for i, param in enumerate(lists.params):
        states = [ind.values(of_all[i]) for of_all in lists.states[: rule.kept(hyper)]]
        arrays = ind.values(lists.value(i)), ind.values(lists.grads[i]), *(states or [None])
        step, real = (
            int(lists.steps[i].item()) + 1,
            np.float64 if param.dtype == F64 else np.float32,
        )
        want.append(rule.formula(*arrays, step, real=real, **plain))
    before, kept = lists.steps.clone(), rule.kept(hyper)
    untouched = [t for tensors in (lists.grads, *lists.states[kept:]) for t in tensors]
    bits = [ind.bits(t).copy() for t in untouched]
    lists.call(rule, **settings)
    assert torch.equal(lists.steps, before + 1)
    for i, (p, *states) in enumerate(want):
        check_param(lists, i, p, hyper)
        for k in range(kept):
            state = lists.states[k][i]
            got = rounded(lists, i, states[k], state, k + 1, hyper)
            ind.assert_bits(state, got, f"state {k} of params[{i}]")
    for t, old in zip(untouched, bits, strict=True):
        assert np.array_equal(ind.bits(t), old), "a gradient or an unused state was written"


def rounded(
    lists: Lists, i: int, x: np.ndarray, to: torch.Tensor, stream: int, hyper: dict[str, Any]
) -> np.ndarray:
    """x in the dtype of `to`, with the random bits where there are to be some."""
    wants = stream > 0 or (hyper.get("stochastic_rounding") and not lists.masters)
    if to.dtype != BF16 or not wants:
        return ind.narrow(x, to.dtype)
    seed, step = hyper.get("seed", 0), int(lists.steps[i].item())
    bits = ind.random16(x.size, seed, step, hyper["indices"][i], stream)
    return ind.stochastic_bf16(x, bits)


def check_param(lists: Lists, i: int, p: np.ndarray, hyper: dict[str, Any]) -> None:
    param, master = lists.params[i], lists.masters[i] if lists.masters else None
    if master is not None and master.dtype == torch.int16:
        code = np.array(p, np.float32).view(np.uint32).astype(np.int64)
        high = (code + 0x8000) >> 16
        ind.assert_bits(param, high.astype(np.uint16), f"params[{i}]")
        assert np.array_equal(master.numpy(), code - (high << 16)), f"masters[{i}]"
        return
    ind.assert_bits(param, rounded(lists, i, p, param, 0, hyper), f"params[{i}]")
    if master is not None:
        ind.assert_bits(master, ind.narrow(p, master.dtype), f"masters[{i}]")
