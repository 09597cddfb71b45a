"""The optimizer updates, bit for bit the references: every mix of dtypes, every option."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import WIDE, WRITABLE, from_bits, name, normal, random_bits
from emulated.agreement import Agreement, Shape, assert_bits, tensors

from mixprec.ops._reference import rounding, state8

INF, NAN = math.inf, math.nan
F32, BF16, F16, F64, INT16, INT8 = *WIDE, torch.float64, torch.int16, torch.int8
U8 = torch.uint8
CHUNK = 32768  # csrc/cuda/common/tensor_list.cuh
# The op, how many states it keeps, and its numbers.
RULES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "decoupled": ("adamw_", 2, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
                                "weight_decay": 1e-2, "decoupled_weight_decay": True}),
    "l2": ("adamw_", 2, {"lr": 1e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6,
                         "weight_decay": 0.1, "decoupled_weight_decay": False}),
    "sgd": ("sgd_", 0, {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.01,
                        "nesterov": False}),
    "momentum": ("sgd_", 1, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.0,
                             "nesterov": False}),
    "nesterov": ("sgd_", 1, {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01,
                             "nesterov": True}),
    "lion": ("lion_", 1, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "muon": ("muon_direction_", 1, {"lr": 0.0, "momentum": 0.95, "nesterov": True}),
}  # fmt: skip
every_rule = pytest.mark.parametrize("rule", RULES)
every_op = pytest.mark.parametrize("rule", ["decoupled", "momentum", "lion", "muon"])
# What comes after the settings, in the schema's order.
TAIL: dict[str, Any] = {
    "maximize": False, "max_value": INF, "stochastic_rounding": False,
    "seed": 0x123456789ABCDEF, "indices": None, "lr_tensor": None, "inv_scale": torch.tensor(0.5),
    "clip": torch.tensor(0.7), "found_inf": torch.tensor(0.0),
}  # fmt: skip
RATES = (None, torch.tensor(0.3), torch.tensor([1 / 3], dtype=F64))
STEPS = (0.0, 1.0, 2.0, 7.0, 999.0, 123_456.0, 2.0**24 - 1, 2.0**24)
# A block and less, and more; whole groups of eight elements, and not; no element.
SHAPES: tuple[Shape, ...] = ((33,), (1025,), (13, 17), (16,), (), (0,), (2, 3, 5))


class Mix(NamedTuple):
    """Dtypes of a param and of what belongs to it."""

    param: torch.dtype
    grad: torch.dtype
    master: torch.dtype | None = None
    states: tuple[torch.dtype, torch.dtype] = (F32, F32)  # as many as the rule keeps


# A list may hold all that have a master, or all that have none.
KINDS: list[tuple[torch.dtype, torch.dtype | None]] = [
    (F32, None), (F32, F32), (BF16, None), (BF16, F32), (BF16, INT16), (BF16, INT8), (F16, None),
    (F16, F32), (F64, None), (F64, F64),
]  # fmt: skip


def mixes(param: torch.dtype, master: torch.dtype | None) -> list[Mix]:
    """Every gradient with every mix of states."""
    if param == F64:
        return [Mix(F64, F64, master, (F64, F64))]
    states = [*itertools.product((F32, BF16), repeat=2), (U8, U8)]
    return [Mix(param, grad, master, s) for s in states for grad in WIDE]


def arguments(
    rule: str, mixed: Sequence[Mix], shapes: Sequence[Shape] = SHAPES, layouts: Sequence[Any] = (),
    steps: Sequence[float] = STEPS, **options: Any,
) -> list[Any]:  # fmt: skip
    """A param for each of `mixed`; shapes, layouts and steps in turn, so that a gradient may have
    another layout than its param. options: of RULES and TAIL."""
    _, count, numbers = RULES[rule]
    params, grads, masters = [], [], []
    states: list[list[torch.Tensor]] = [[] for _ in range(count)]
    scales: list[list[torch.Tensor]] = [[] for _ in range(count)]
    layouts = layouts or WRITABLE[:1]
    for i, mix in enumerate(mixed):
        shape, real = shapes[i % len(shapes)], F64 if mix.param == F64 else F32
        own, other = (layouts[(i + k) % len(layouts)] for k in range(2))
        wide = normal(shape, real, seed=10 * i)
        low, kept = rounding.split_master(wide) if mix.master in (INT16, INT8) else (wide, wide)
        kept = (kept >> 8).to(INT8) if mix.master == INT8 else kept
        params.append(own(low.to(mix.param)))
        grads.append(other(normal(shape, mix.grad, seed=10 * i + 1)))
        for k, state in enumerate(mix.states[:count]):
            value = normal(shape, real, seed=10 * i + 2 + k)
            value, scale = (value.square() if k else value), torch.empty(0)
            if state == U8:  # magnitudes that differ more than those of the codes
                value = value * torch.exp2(12 * normal(shape, F32, seed=10 * i + 4 + k))
                value, scale = state8.encode(value, (state8.SIGNED, state8.UNSIGNED)[k])
            states[k].append(own(value.to(state)))
            scales[k].append(scale)
        if mix.master is not None:
            masters.append(own(kept))
    options = {"indices": [(7 * i + (1 << 29)) % (1 << 30) for i in range(len(mixed))], **options}
    values = numbers | TAIL | options
    counts = torch.tensor([steps[i % len(steps)] for i in range(len(mixed))])
    lr, *settings = (values.pop(name) for name in numbers)
    flat = [[x for of_state in lists for x in of_state] for lists in (states, scales)]
    settings = [float(x) for x in settings]
    return [params, grads, *flat, masters, counts, lr, settings, *values.values()]


def check(agree: Agreement, rule: str, *args: Any, **options: Any) -> list[Any]:
    return agree(RULES[rule][0], arguments(rule, *args, **options))


@pytest.mark.parametrize("kind", KINDS, ids=name)
@every_rule
def test_updates(agree: Agreement, rule: str, kind: tuple[Any, Any]) -> None:
    """Every mix of dtypes and masters, rounded in every way; the options that do not meet the
    dtypes in turn (test_options has all combinations of them)."""
    found, turn = mixes(*kind), KINDS.index(kind)
    for i, stochastic in enumerate((False, True), start=turn):
        options = {"maximize": i % 2 == 1, "max_value": (INF, 0.3)[i // 2 % 2],
                   "lr_tensor": RATES[i % 3], "seed": (-1, 0, 1, 2**63 - 1, 16)[i % 5]}  # fmt: skip
        some, layouts = (found if agree.quick else found[i % 2 :: 2]), WRITABLE[i % 8 :]
        check(agree, rule, some, layouts=layouts, stochastic_rounding=stochastic, **options)
    chunks = [(n,) for n in (CHUNK - 1, CHUNK, 17, 2 * CHUNK + 13)]
    for i, shape in enumerate(agree.affordable(chunks)):
        check(agree, rule, found[i::4], [shape], stochastic_rounding=i % 2 == 0)
    for shape in agree.affordable([(131, 257)]):
        check(agree, rule, found[turn % 3 :: 7], [shape], WRITABLE[1:], stochastic_rounding=True)


NUMBERS: dict[str, list[dict[str, Any]]] = {
    "decoupled": [{"lr": 0.0, "weight_decay": 0.0}, {"beta1": 0.0, "beta2": 0.0}, {"eps": 0.0},
                  {"eps": 1e-30, "lr": 1e10, "weight_decay": 0.3},
                  {"beta1": 0.95, "beta2": 0.99999, "lr": 3.3e-5}],
    "momentum": [{"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0},
                 {"lr": 3e4, "weight_decay": 0.3, "dampening": 1.0, "nesterov": True}],
    "lion": [{"lr": 0.0, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.0},
             {"lr": 1e10, "weight_decay": 0.3, "beta1": 0.95, "beta2": 0.98}],
    "muon": [{"momentum": 0.0, "nesterov": False}],
}  # fmt: skip


@every_op
def test_options(agree: Agreement, rule: str) -> None:
    """What the gradient and the rate depend on and numbers, in both widths of the arithmetic."""
    mixed = [Mix(F16, F16), Mix(F64, F64, None, (F64, F64))]
    flags = {"decoupled": "decoupled_weight_decay", "momentum": "nesterov", "muon": "nesterov"}
    flag = (flags[rule],) if rule in flags else ()
    signs = itertools.product((False, True), (INF, 0.1), RATES, *[(False, True)] * len(flag))
    given = itertools.product((None, *map(torch.tensor, (0.7,))), repeat=3)
    cases = [
        *(dict(zip(("maximize", "max_value", "lr_tensor", *flag), c, strict=True)) for c in signs),
        *(dict(zip(("inv_scale", "clip", "found_inf"), c, strict=True)) for c in given),
        *NUMBERS[rule],
    ]
    for options in cases:
        if options.get("found_inf") is not None:
            options["found_inf"] = torch.tensor(-0.0)
        check(agree, rule, mixed, ((5,), (7,)), steps=(0.0, 1.0), **options)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, INF, NAN])
@every_rule
def test_updates_skip(agree: Agreement, rule: str, found_inf: float) -> None:
    """Nothing is written, the steps not either, whatever the gradients hold."""
    for masters in (False, True):
        mixed = [mixes(*kind)[-1] for kind in KINDS if (kind[1] is not None) is masters]
        args = arguments(rule, mixed, found_inf=torch.tensor(found_inf), stochastic_rounding=True)
        args[1] = [torch.full_like(g, NAN) for g in args[1]]
        before = [t.clone() for t in tensors(args)]
        assert_bits(tensors(agree(RULES[rule][0], args)), before)


@pytest.mark.parametrize("kind", KINDS, ids=name)
@every_rule
def test_updates_of_any_bits(agree: Agreement, rule: str, kind: tuple[Any, Any]) -> None:
    """Subnormal, huge, infinite and NaN gradients and states; zero params beside any remainder."""
    for i, mix in enumerate(mixes(*kind)[::4]):
        args = arguments(rule, [mix], ((1 << 12,),), inv_scale=None, stochastic_rounding=True,
                         max_value=(INF, 1e30)[i % 2])  # fmt: skip
        for seed, tensor in enumerate(tensors(args[:5])):
            if tensor.numel() > 1:
                tensor.copy_(random_bits(tensor.numel(), tensor.dtype, seed))
        args[0][0][:64] = 0.0
        args[0][0][32:64] = -0.0
        if mix.grad == F32:  # NaN whose payload a carry would run through, into the sign
            args[1][0].view(torch.int32)[64:128] = 0x7FFFFFFF
        agree(RULES[rule][0], args)


def test_bias_correction_at_any_step(agree: Agreement) -> None:
    """Another step for every param of a list; finite where an FP32 counter stands still."""
    steps = (*STEPS, 99.0, 1000.0, 12345.0, 999_999.0, 2.0**23 - 1)
    mixed = [mix for mix in (Mix(F32, F32), Mix(F64, F64, None, (F64, F64))) for _ in steps]
    for beta1, beta2 in ((0.9, 0.999), (0.95, 0.95), (0.5, 0.99999)):
        args = arguments("decoupled", mixed, ((33,),), steps=steps, beta1=beta1, beta2=beta2)
        after = agree("adamw_", args)
        assert after[5].max() == 2.0**24
        assert all(t.isfinite().all() for t in tensors(after))


@pytest.mark.parametrize("rule", ["decoupled", "l2", "sgd", "nesterov", "lion"])
def test_no_decay_leaves_an_infinite_param_alone(agree: Agreement, rule: str) -> None:
    """A mask of -inf that is a param: 0 * inf would be NaN."""
    args = arguments(rule, [Mix(F32, F32)], weight_decay=0.0)
    args[0][0].fill_(-INF)
    assert agree(RULES[rule][0], args)[0][0].eq(-INF).all()


@every_rule
def test_zeros_and_params_beside_masters(agree: Agreement, rule: str) -> None:
    """Gradients and states of both zeros; what a param with a master holds does not matter."""
    for options in ({}, {"eps": 0.0}) if RULES[rule][0] == "adamw_" else ({},):  # 0 / 0
        args = arguments(rule, [Mix(F32, F32)], **options)
        for t in (*args[1], *args[2]):
            t.zero_()[::2].neg_()
        agree(RULES[rule][0], args)
    for mix in (Mix(F16, F16, F32), Mix(F64, F64, F64, (F64, F64))):
        args = arguments(rule, [mix])
        args[0][0].fill_(NAN)
        agree(RULES[rule][0], args)


def test_maximize_negates_zeros_too(agree: Agreement) -> None:
    """The first buffer is the gradient: -0 where that is 0, not 0 - 0."""
    args = arguments("momentum", [Mix(F32, F32)], steps=(0.0,), maximize=True, weight_decay=0.0)
    args[1][0].zero_()
    args[0][0].abs_().neg_()
    assert agree("sgd_", args)[2][0].signbit().all()


def test_remainders_hold_every_master(agree: Agreement) -> None:
    """A step of rate 0 leaves param and remainder as they are: ties between two params above all,
    which rounding to nearest even would lose."""
    high = np.random.default_rng(0).integers(0x0080, 0x7F00, 400, dtype=np.uint32) << 16
    bits = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    master = torch.cat([from_bits(bits, F32), -from_bits(bits, F32)])
    for dtype, shift, kept in (
        (INT16, 0, master),
        (INT8, 8, master[master.view(torch.int32) & 0xFF == 0]),
    ):
        args = arguments("sgd", [Mix(BF16, F32, dtype)], (tuple(kept.shape),), lr=0.0,
                         weight_decay=0.0)  # fmt: skip
        param, remainder = rounding.split_master(kept)
        args[0], args[4] = [param], [(remainder >> shift).to(dtype)]
        after = agree("sgd_", args)
        assert_bits([rounding.join_master(after[0][0], after[4][0])], [kept], "master")


@every_rule
def test_many_tensors_take_several_launches(agree: Agreement, rule: str) -> None:
    """More than one launch's worth of constants, and no param at all. Indices are needed only
    where something is rounded at random."""
    found = [mix for kind in KINDS if kind[1] is not None for mix in mixes(*kind)]
    mixed = [found[i % len(found)] for i in range(agree.count)]
    check(agree, rule, mixed, ((0,), (1,), (2,)), steps=[float(i * i) for i in range(agree.count)])
    check(agree, rule, [Mix(BF16, BF16, F32)] * 2, ((33,), (0,)), indices=[])
    check(agree, rule, [], indices=[])
