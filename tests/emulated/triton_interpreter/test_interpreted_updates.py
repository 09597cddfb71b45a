"""adamw_ and sgd_ in Triton's interpreter, bit for bit the references; the random bits they use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    WIDE,
    WRITABLE,
    Layout,
    contiguous,
    from_bits,
    name,
    normal,
    random_bits,
    transposed,
)
from emulated.ops import launcher
from emulated.triton_interpreter.helpers import (
    INF,
    NAN,
    agree,
    f32,
    no_warnings,
    same_bits,
    tensors,
    tl,
    triton,
)

from mixprec.ops._dispatch import rounding
from mixprec.triton_kernels import philox

pytestmark = no_warnings
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INT16 = torch.int16
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of param, gradient, master
# Every param with every master; the gradients' dtypes, which meet no other, in turn.
BARE: list[Dtypes] = [(F32, BF16, None), (BF16, F32, None), (F16, F16, None), (F64, F64, None)]
WITH_MASTERS: list[Dtypes] = [
    (F32, F16, F32), (BF16, BF16, F32), (BF16, F32, INT16), (F16, F32, F32), (F64, F64, F64),
]  # fmt: skip
STATES = {"adamw_": 2, "sgd_": 1}
TAIL: dict[str, Any] = {
    "maximize": False, "max_value": INF, "stochastic_rounding": False, "seed": 0x123456789ABCDEF,
    "indices": [], "lr_tensor": None, "inv_scale": f32(0.5), "clip": f32(0.25),
    "found_inf": f32(0.0),
}  # fmt: skip
# The arguments after `steps`, in order.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw_": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
               "decoupled_weight_decay": True, **TAIL},
    "sgd_": {"lr": 1e-3, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01,
             "nesterov": False, **TAIL},
}  # fmt: skip
# One program and less, and more; whole groups of eight elements, and not.
UPDATE_SHAPES = ((33,), (1025,), (13, 17), (16,), (), (0,))


def update_arguments(
    op: str,
    mixed: Sequence[Dtypes],
    narrow: Sequence[bool] | None,  # which states are bf16; None: without states
    shapes: Sequence[tuple[int, ...]] = UPDATE_SHAPES,
    steps: Sequence[float] = (0.0, 1.0, 7.0, 999.0, 1e6),
    layout: Layout = contiguous,
    **options: Any,
) -> list[Any]:
    """One param for each of `mixed`; shapes and steps are taken in turn."""
    lists: list[list[torch.Tensor]] = [[] for _ in range(3 + STATES[op])]
    params, grads, *states, masters = lists
    if narrow is None:
        states = []
    for i, (dtype, grad, master) in enumerate(mixed):
        shape = shapes[i % len(shapes)]
        real = F64 if dtype == F64 else F32
        wide = normal(shape, real, 10 * i)
        param, low = wide.to(dtype), wide
        if master == INT16:
            param, low = rounding.split_master(wide)
        if master is not None:
            masters.append(layout(low))
        params.append(layout(param))
        grads.append(layout(normal(shape, grad, 10 * i + 1)))
        for k, state in enumerate(states):
            value = normal(shape, real, 10 * i + 2 + k)
            value = value.square() if k else value
            state.append(layout(value.to(BF16 if narrow[k] and real == F32 else real)))
    counts = torch.tensor([steps[i % len(steps)] for i in range(len(mixed))])
    options = OPTIONS[op] | {"indices": list(range(5, 5 + len(mixed)))} | options
    if narrow is None:
        lists = [params, grads, [], masters]
    return [*lists, counts, *options.values()]


RATES = (None, f32(0.3), torch.tensor([0.3], dtype=F64))


def tail(case: int) -> dict[str, Any]:
    """Options that do not meet the dtypes, in turn; test_tails has all combinations of them."""
    return {
        "maximize": case % 2 == 1,
        "max_value": (INF, 0.1)[case // 2 % 2],
        "lr_tensor": RATES[case % 3],
        "seed": (-1, 0, 1, 2**63 - 1, 16)[case % 5],
    }


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("mixed", [BARE, WITH_MASTERS], ids=["bare", "masters"])
@pytest.mark.parametrize("narrow", [*itertools.product((False, True), repeat=2)], ids=str)
def test_adamw(narrow: tuple[bool, bool], mixed: list[Dtypes], stochastic: bool) -> None:
    """Every mix of dtypes and masters in one list, with every way to round."""
    case = 2 * narrow[0] + narrow[1] + 3 * stochastic
    options = {**tail(case), "decoupled_weight_decay": case % 4 < 2}
    agree("adamw_", lambda: update_arguments(
        "adamw_", mixed, narrow, **options, stochastic_rounding=stochastic))  # fmt: skip


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("mixed", [BARE, WITH_MASTERS], ids=["bare", "masters"])
@pytest.mark.parametrize("narrow", [None, [False], [True]], ids=str)
def test_sgd(narrow: list[bool] | None, mixed: list[Dtypes], stochastic: bool) -> None:
    """As test_adamw. Without buffers there is one formula."""
    for case, nesterov in enumerate((False, True) if narrow else (False,), start=stochastic):
        options = {**tail(case), "nesterov": nesterov, "dampening": 0.1 * case}
        agree("sgd_", lambda o=options: update_arguments(
            "sgd_", mixed, narrow, **o, stochastic_rounding=stochastic))  # fmt: skip


@pytest.mark.parametrize("op", STATES)
def test_gradients_of_updates(op: str) -> None:
    mixed: list[Dtypes] = [(dtype, grad, None) for dtype in WIDE for grad in WIDE]
    agree(op, lambda: update_arguments(op, mixed, [False] * STATES[op]))


@pytest.mark.parametrize("op", STATES)
def test_tails(op: str) -> None:
    """What the gradient and the rate depend on, in both widths of the arithmetic."""
    mixed: list[Dtypes] = [(F16, F16, None), (F64, F64, None)]
    flag = {"adamw_": "decoupled_weight_decay", "sgd_": "nesterov"}[op]
    signs = itertools.product((False, True), (INF, 0.1), RATES, (False, True))
    scalars = itertools.product((None, f32(0.7)), (None, f32(0.3)), (None, f32(0.0)))
    cases = [
        *(dict(zip(("maximize", "max_value", "lr_tensor", flag), c, strict=True)) for c in signs),
        *(dict(zip(("inv_scale", "clip", "found_inf"), c, strict=True)) for c in scalars),
    ]
    for options in cases:
        agree(op, lambda o=options: update_arguments(
            op, mixed, [False] * STATES[op], ((5,), (7,)), (0.0, 1.0), **o))  # fmt: skip


@pytest.mark.parametrize("op", STATES)
def test_updates_skip(op: str) -> None:
    """Nothing is written, the steps not either, whatever the gradients hold."""
    lists = itertools.cycle(itertools.product((BARE, WITH_MASTERS), (False, True)))
    for found_inf, (mixed, narrow) in zip((1.0, 2.0, -1.0, INF, NAN), lists, strict=False):
        args = update_arguments(op, mixed, [narrow] * STATES[op], found_inf=f32(found_inf),
                                stochastic_rounding=narrow)  # fmt: skip
        args[1] = [torch.full_like(g, NAN) for g in args[1]]
        before = [t.clone() for t in tensors(args)]
        launcher(op)(*args)
        for after, was in zip(tensors(args), before, strict=True):
            same_bits(after, was, op)


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("layout", WRITABLE, ids=name)
def test_updates_of_layouts(layout: Layout, op: str) -> None:
    """Random bits go to elements in row-major order, whatever the order in memory."""
    shapes = ((2, 3, 5), (13, 17))
    for masters, narrow in (((None, None), False), ((F32, INT16), False), ((INT16, F32), True)):
        mixed = [(BF16, F32, master) for master in masters]
        make = lambda r=mixed, n=narrow, order=layout: update_arguments(  # noqa: E731
            op, r, [n] * STATES[op], shapes, layout=order, stochastic_rounding=True)  # fmt: skip
        agree(op, make)

        def other_order(make: Callable[[], list[Any]] = make) -> list[Any]:
            args = make()  # the gradients in another order than the rest
            args[1] = [transposed(g) for g in args[1]]
            return args

        agree(op, other_order)


@pytest.mark.parametrize(
    ("op", "numbers"),
    [
        ("adamw_", {"lr": 0.0, "weight_decay": 0.0}),
        ("adamw_", {"beta1": 0.0, "beta2": 0.0}),
        ("adamw_", {"eps": 0.0}),
        ("adamw_", {"eps": 1e-30, "lr": 1e10, "weight_decay": 0.3}),
        ("adamw_", {"beta1": 0.95, "beta2": 0.99999, "lr": 3.3e-5}),
        ("sgd_", {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}),
        ("sgd_", {"lr": 3e4, "weight_decay": 0.3, "dampening": 1.0, "nesterov": True}),
    ],
    ids=name,
)
def test_numbers_of_updates(op: str, numbers: dict[str, float]) -> None:
    mixed: list[Dtypes] = [(F16, F16, F32), (F64, F64, F64)]
    agree(op, lambda: update_arguments(op, mixed, [False] * STATES[op], **numbers))


@pytest.mark.parametrize("op", STATES)
def test_updates_of_any_pattern(op: str) -> None:
    """Subnormal, huge, infinite and NaN gradients and states; zero params beside any remainder."""

    def make(row: Dtypes, narrow: bool) -> list[Any]:
        args = update_arguments(op, [row], [narrow] * STATES[op], ((1 << 12,),), inv_scale=None,
                                stochastic_rounding=True, clip=f32(0.7))  # fmt: skip
        for seed, tensor in enumerate(tensors(args[: 3 + STATES[op]])):
            tensor.copy_(random_bits(tensor.numel(), tensor.dtype, seed))
        args[0][0][:64] = 0.0
        args[0][0][32:64] = -0.0
        if row[1] == F32:  # NaN whose payload a carry would run through, into the sign
            args[1][0].view(torch.int32)[64:128] = 0x7FFFFFFF
        return args

    for row, narrow in itertools.product(
        ((F32, F32, None), (BF16, F32, None), (BF16, F32, INT16), (F16, BF16, F32)), (False, True)
    ):
        agree(op, lambda row=row, narrow=narrow: make(row, narrow))


def test_maximize_negates_zeros_too() -> None:
    """The first buffer is the gradient: -0 where that is 0, not 0 - 0."""

    def make() -> list[Any]:
        args = update_arguments("sgd_", [(F32, F32, None)], [False], steps=(0.0,), maximize=True,
                                weight_decay=0.0)  # fmt: skip
        args[1][0].zero_()
        args[0][0].abs_().neg_()
        return args

    agree("sgd_", make)
    args = make()
    launcher("sgd_")(*args)
    assert args[2][0].signbit().all()


def test_remainders_hold_every_master() -> None:
    """A step of rate 0 leaves param and remainder as they are: ties between two params above all,
    which rounding to nearest even would lose."""
    high = np.random.default_rng(0).integers(0x0080, 0x7F00, 400, dtype=np.uint32) << 16
    bits = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    master = torch.cat([from_bits(bits, F32), -from_bits(bits, F32)])

    def make() -> list[Any]:
        args = update_arguments("sgd_", [(BF16, F32, INT16)], None, (tuple(master.shape),),
                                lr=0.0, weight_decay=0.0)  # fmt: skip
        for tensor, value in zip((args[0][0], args[3][0]), rounding.split_master(master),
                                 strict=True):  # fmt: skip
            tensor.copy_(value)
        return args

    agree("sgd_", make)
    args = make()
    launcher("sgd_")(*args)
    same_bits(rounding.join_master(args[0][0], args[3][0]), master, "master")


@pytest.mark.parametrize("op", STATES)
def test_updates_of_none_and_of_many_params(op: str) -> None:
    """More than one program's worth of constants."""
    count = 131
    steps = [float(i * i) for i in range(count)]
    shapes = [(0,)] * (count - 4) + [(3,)] * 4  # empty ones have constants too
    for mixed in ([], [(F32, F32, None)] * count):
        narrow = [False] * STATES[op]
        agree(op, lambda r=mixed, n=narrow: update_arguments(op, r, n, shapes, steps))


@triton.jit
def random16_kernel(out_ptr, start: tl.int64, seed: tl.int64, step, index, STREAM: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    key = (seed, step.to(tl.uint32), index)
    bits = philox.random16(start, key, STREAM, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), bits.to(tl.int32))


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 0x123456789ABCDEF])
def test_random_bits(seed: int) -> None:
    """Also where no tensor of a test reaches: counters of more than 32 bits, the last index."""
    block = 64
    starts = (0, 8 * (2**32 - 3), 2**45)
    for stream, start in itertools.product(range(3), starts):
        step, index = (1, 2**30 - 1) if stream == 1 else (2**24, 0)
        got = torch.zeros(block, dtype=torch.int32)
        random16_kernel[(1,)](got, start, seed, step, index, STREAM=stream, BLOCK=block)
        eighth = torch.arange(start // 8, start // 8 + block // 8)
        words = (eighth & 0xFFFFFFFF, eighth >> 32, torch.full_like(eighth, step),
                 torch.full_like(eighth, index + (stream << 30)))  # fmt: skip
        bits = rounding.philox(words, seed)
        want = torch.stack([bits & 0xFFFF, bits >> 16], dim=-1).reshape(-1)
        assert got.tolist() == want.tolist()
