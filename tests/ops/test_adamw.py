"""adamw_: operation by operation, bit for bit, against an FP32 step written in NumPy."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    LARGE,
    SHAPES,
    WIDE,
    WRITABLE,
    Layout,
    contiguous,
    for_each,
    normal,
    random_bits,
    transposed,
)
from hypothesis import given
from hypothesis import strategies as st

from mixprec.ops import adamw_
from mixprec.ops._reference.rounding import split_master

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
OTHER = {"lr": 0.37, "beta1": 0.0, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.0}


@dataclass
class Lists:
    """The arguments of one call, and what they must hold after it."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    steps: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = None,
        *,
        master: bool | str = False,
        moments: torch.dtype | None = None,
        step: int = 0,
        layouts: tuple[Layout, ...] = (contiguous,) * 5,
        seed: int = 0,
    ) -> None:
        """master: False, True for one in fp32, "remainder" for the bits that a bf16 param lacks."""
        real = torch.float64 if dtype == torch.float64 else torch.float32
        moments = moments or real
        exact = normal(shape, real, seed)
        old = float(step > 0)
        self.params.append(layouts[0](exact.to(dtype)))
        self.grads.append(layouts[1](normal(shape, grad_dtype or dtype, seed + 1)))
        self.exp_avgs.append(layouts[2]((normal(shape, real, seed + 2) * old).to(moments)))
        second = normal(shape, real, seed + 3).square() * old
        self.exp_avg_sqs.append(layouts[3](second.to(moments)))
        if master == "remainder":
            param, remainder = split_master(exact)
            self.params[-1] = layouts[0](param)
            # every_second and padded_rows surround it with NaN, which integers have not
            self.masters.append(transposed(remainder))
        elif master:
            self.masters.append(layouts[4](exact))
        self.counts.append(step)
        self.steps = torch.tensor(self.counts, dtype=torch.float32)

    def lists(self) -> tuple[list[torch.Tensor], ...]:
        return self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters

    def all(self) -> list[torch.Tensor]:
        return [*(t for tensors in self.lists() for t in tensors), self.steps]

    def clone(self) -> Lists:
        # torch.clone keeps the strides of dense tensors, which is all that is needed here
        lists = ([t.clone() for t in tensors] for tensors in self.lists())
        return Lists(*lists, list(self.counts), self.steps.clone())

    def call(self, **settings: object) -> None:
        adamw_(*self.lists(), self.steps, **as_tensors(HYPER | settings))  # type: ignore[arg-type]


def as_tensors(hyper: dict[str, Any]) -> dict[str, Any]:
    """The settings as the ops take them."""
    device = ("inv_scale", "clip", "found_inf")
    return {k: torch.tensor(v, dtype=torch.float32) if k in device else v for k, v in hyper.items()}


def for_numpy(hyper: dict[str, Any]) -> dict[str, Any]:
    left = ("found_inf", "stochastic_rounding", "seed", "indices")
    plain = {k: v for k, v in hyper.items() if k not in left}
    return plain | {"lr": float(plain["lr"])}


def patterns(t: torch.Tensor) -> np.ndarray:
    return t.numpy() if t.dtype == torch.int16 else ind.bits(t)


def master_of(lists: Lists, i: int) -> torch.Tensor:
    if not lists.masters:
        return lists.params[i]
    master = lists.masters[i]
    if master.dtype != torch.int16:
        return master
    high = ind.bits(lists.params[i]).astype(np.int64) << 16
    code = (high + master.numpy()) & 0xFFFFFFFF
    return torch.from_numpy(np.array(code, np.uint32).view(np.float32))


def check_results(
    lists: Lists, i: int, p: np.ndarray, states: list[tuple[torch.Tensor, np.ndarray]], hyper: dict
) -> None:
    """Param and master number i and its states against the numbers of the step just done."""
    param, master = lists.params[i], lists.masters[i] if lists.masters else None

    def rounded(x: np.ndarray, to: torch.Tensor, stream: int) -> np.ndarray:
        """With the random bits where there are to be some."""
        wants = stream > 0 or (hyper.get("stochastic_rounding") and master is None)
        if to.dtype != torch.bfloat16 or not wants:
            return ind.narrow(x, to.dtype)
        seed, step = hyper.get("seed", 0), int(lists.steps[i].item())
        bits = ind.random16(x.size, seed, step, hyper["indices"][i], stream)
        return ind.stochastic_bf16(x, bits)

    if master is not None and master.dtype == torch.int16:
        code = np.array(p, np.float32).view(np.uint32).astype(np.int64)
        high = (code + 0x8000) >> 16
        ind.assert_bits(param, high.astype(np.uint16), f"params[{i}]")
        assert np.array_equal(master.numpy(), code - (high << 16)), f"masters[{i}]"
    else:
        ind.assert_bits(param, rounded(p, param, 0), f"params[{i}]")
        if master is not None:
            ind.assert_bits(master, ind.narrow(p, master.dtype), f"masters[{i}]")
    for stream, (state, x) in enumerate(states, 1):
        ind.assert_bits(state, rounded(x, state, stream), f"state {stream} of params[{i}]")


def real_of(param: torch.Tensor) -> type[np.floating]:
    return np.float64 if param.dtype == torch.float64 else np.float32


def check(lists: Lists, **settings: object) -> None:
    """One call, and every bit of params, moments, masters and steps against NumPy."""
    hyper, want = HYPER | settings, []
    for i, param in enumerate(lists.params):
        arrays = (master_of(lists, i), lists.grads[i], lists.exp_avgs[i], lists.exp_avg_sqs[i])
        step, real = int(lists.steps[i].item()) + 1, real_of(param)
        want.append(ind.adamw(*map(ind.values, arrays), step, real=real, **for_numpy(hyper)))
    before = lists.steps.clone()
    grads = [ind.bits(g).copy() for g in lists.grads]
    lists.call(**settings)
    assert torch.equal(lists.steps, before + 1)
    for i, (p, m, v) in enumerate(want):
        check_results(lists, i, p, [(lists.exp_avgs[i], m), (lists.exp_avg_sqs[i], v)], hyper)
        assert np.array_equal(ind.bits(lists.grads[i]), grads[i]), "adamw_ wrote to a gradient"


KINDS = [(p, g, m) for p in WIDE for g in WIDE for m in (False, True)]
KINDS.append((torch.float64, torch.float64, False))


def all_shapes(param: torch.dtype, grads: tuple[torch.dtype, ...], **settings: Any) -> Lists:
    """Every shape, and every layout: the same for a param's five tensors, or five others."""
    lists = Lists()
    for i, shape in enumerate((*SHAPES, *[(13, 17)] * len(WRITABLE))):  # the empty ones among them
        each = tuple(WRITABLE[(i // 2 if i % 2 else i + j) % len(WRITABLE)] for j in range(5))
        lists.add(shape, param, grads[i % len(grads)], step=i % 5, layouts=each, seed=10 * i,
                  **settings)  # fmt: skip
    return lists


@pytest.mark.parametrize(("param", "grad", "master"), KINDS, ids=str)
def test_every_dtype_mix_and_layout(
    backend: str, param: torch.dtype, grad: torch.dtype, master: bool
) -> None:
    lists = all_shapes(param, (grad,), master=master)
    check(lists, inv_scale=2.0**-9, clip=0.7)
    check(lists, **OTHER, maximize=True)
    check(lists, decoupled_weight_decay=False, max_value=0.5)


RANDOM = [
    (torch.float32, False, torch.bfloat16, False),
    (torch.float16, True, torch.bfloat16, True),
    (torch.bfloat16, False, torch.bfloat16, True),
    (torch.bfloat16, False, torch.bfloat16, False),
    (torch.bfloat16, False, torch.float32, True),
    (torch.bfloat16, True, torch.bfloat16, True),
    (torch.bfloat16, "remainder", torch.bfloat16, False),
    (torch.bfloat16, "remainder", torch.float32, False),
]


@pytest.mark.parametrize(("param", "master", "moments", "stochastic"), RANDOM, ids=str)
def test_bf16_moments_remainders_and_stochastic_params(
    backend: str, param: torch.dtype, master: bool | str, moments: torch.dtype, stochastic: bool
) -> None:
    """Random bits are counted in row-major order whatever the memory order is."""
    grads = (param, torch.float32, torch.float32)
    lists = all_shapes(param, grads, master=master, moments=moments)
    indices = [(7 * i) % 1000 for i in range(len(lists.params))]
    random = {"indices": indices, "stochastic_rounding": stochastic}
    check(lists, seed=5, **random)
    check(lists, seed=2**62 + 12345, inv_scale=0.3, decoupled_weight_decay=False, **random)


def test_no_decay_leaves_an_infinite_param_alone(backend: str) -> None:
    """A mask of -inf that is a param: 0 * inf would be NaN."""
    for decoupled in (True, False):
        lists = Lists()
        lists.add((3,))
        lists.params[0].copy_(torch.tensor([1.0, -math.inf, -0.0]))
        lists.grads[0].copy_(torch.tensor([1.0, 0.0, 0.0]))
        check(lists, weight_decay=0.0, decoupled_weight_decay=decoupled)
        assert lists.params[0][1] == -math.inf


def test_large(two_threads: None) -> None:
    """For the parallel paths; the same bits in a second run."""
    mixed = (contiguous, transposed, contiguous, transposed, contiguous)
    lists = {
        torch.float64: {"inv_scale": 0.125},
        torch.float32: {"inv_scale": 0.125},
        torch.float16: {"inv_scale": 0.125},
        torch.bfloat16: {"indices": [1, 0, 5, 3], "stochastic_rounding": True, "seed": 9},
    }
    for dtype, settings in lists.items():
        large = Lists()
        for i, shape in enumerate(LARGE):
            for layouts in (mixed, (contiguous,) * 5):
                moments = dtype if dtype == torch.bfloat16 else None
                large.add(shape, dtype, master=dtype == torch.float16, moments=moments, step=3,
                          seed=i, layouts=layouts)  # fmt: skip
        again = large.clone()
        check(large, **settings)
        again.call(**settings)
        for one, two in zip(large.all(), again.all(), strict=True):
            ind.assert_same_bits(one, two, f"second run, {dtype}")


EFFECTS = (
    {"weight_decay": 0.0},
    {"weight_decay": 0.5},
    {"lr": torch.tensor(3e-4)},
    {"lr": torch.tensor([3e-4], dtype=torch.float64)},
    {"lr": 0.0},
    {"beta1": 0.95, "beta2": 0.98},
    {"beta1": 0.0},
    {"eps": 1e-3},
    {"decoupled_weight_decay": False, "weight_decay": 0.1},
    {"max_value": 0.1},
    {"maximize": True},
    {"inv_scale": 1 / 3},
    {"clip": 1 / 3},
    {"inv_scale": 2.0**-16, "clip": 0.9, "maximize": True},
)


def test_every_setting_has_its_effect(backend: str) -> None:
    for hyper in EFFECTS:
        for dtype in (torch.float32, torch.float64):
            lists = Lists()
            lists.add((401,), dtype, step=2)
            plain = lists.clone()
            check(lists, **hyper)
            plain.call()
            assert not torch.equal(lists.params[0], plain.params[0]), f"no effect: {hyper}"


def test_bias_correction_at_any_step(backend: str) -> None:
    """Another step for every param of a list; finite where an FP32 counter stands still."""
    for betas in ((0.9, 0.999), (0.95, 0.95), (0.5, 0.99999)):
        lists = Lists()
        for step in (0, 1, 2, 7, 99, 1000, 12345, 999_999, 2**23 - 1, 2**24 - 1):
            for dtype in (torch.float32, torch.float64):
                lists.add((33,), dtype, step=step, seed=step)
        check(lists, beta1=betas[0], beta2=betas[1])
        assert lists.steps.max() == 2.0**24
        lists.call()
        assert all(t.isfinite().all() for t in lists.all())


def test_extreme_values(backend: str) -> None:
    """Any bit pattern in any role: NaN and Inf included, subnormals not flushed."""
    for dtype in (*WIDE, torch.float64):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        lists = Lists()
        lists.add((20_000,), dtype, step=4)
        lists.params[0].copy_(random_bits(20_000, dtype, 1))
        lists.grads[0].copy_(random_bits(20_000, dtype, 2))
        lists.exp_avgs[0].copy_(random_bits(20_000, real, 3))
        lists.exp_avg_sqs[0].copy_(random_bits(20_000, real, 4).abs())
        check(lists)
        check(lists, inv_scale=2.0**20)
        check(lists, max_value=1.0, weight_decay=0.0)


def test_zeros_nan_params_and_no_params(backend: str) -> None:
    adamw_([], [], [], [], [], torch.zeros(0), **HYPER)
    for eps in (1e-8, 0.0):  # 0 / 0 is NaN by the formula, on every backend
        lists = Lists()
        lists.add((17,))
        lists.grads[0].zero_()
        check(lists, eps=eps)
    for dtype in (torch.float16, torch.float64):  # what a param with a master held does not matter
        lists = Lists()
        lists.add((9,), dtype, master=True)
        lists.params[0].fill_(math.nan)
        check(lists)


@given(st.integers(1, 100), st.integers(0, 1 << 30), st.booleans())
def test_lists(count: int, seed: int, masters: bool) -> None:
    rng = random.Random(seed)
    lists = Lists()
    for i in range(count):
        dtype = rng.choice(WIDE if masters else (*WIDE, torch.float64))
        grad = dtype if dtype == torch.float64 else rng.choice(WIDE)
        shape = rng.choice([(0,), (1,), (), (5, 0), (17,), (3, 7), (64,)])
        layouts = tuple(rng.choice(WRITABLE) for _ in range(5))
        lists.add(shape, dtype, grad, master=masters, step=rng.choice([0, 1, 9]),
                  layouts=layouts, seed=i)  # fmt: skip
    check(lists, inv_scale=rng.choice([1.0, 2.0**-12, 0.3]))


def test_found_inf_skips_everything(backend: str) -> None:
    plain, with_masters, remainders = Lists(), Lists(), Lists()
    for i, (param, grad, master) in enumerate(KINDS):
        (with_masters if master else plain).add((5, 7), param, grad, master=master, step=i, seed=i)
    plain.grads[0][0] = math.nan
    for i in range(3):
        remainders.add((i, 33), torch.bfloat16, master="remainder", moments=torch.bfloat16, seed=i)
    for each in (plain, with_masters, remainders):
        before = [patterns(t).copy() for t in each.all()]
        for flag in (1.0, 2.0, 0.5, math.inf, math.nan, -1.0):
            each.call(found_inf=flag, inv_scale=0.5, indices=list(range(len(each.params))))
            for t, pattern in zip(each.all(), before, strict=True):
                assert np.array_equal(patterns(t), pattern), f"found_inf {flag}: written to"
    for flag in (0.0, -0.0):
        check(with_masters, found_inf=flag)


def one(**changes: object) -> dict[str, object]:
    """The arguments for one FP32 param of shape [3], some of them replaced."""
    t = torch.ones(3)
    lists = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    args: dict[str, object] = {key: [t.clone()] for key in lists}
    return args | {"masters": [], "steps": torch.zeros(1)} | HYPER | changes


T = torch.ones(3)
META = torch.ones(3, device="meta")


@for_each(
    "changes, error, message",
    [
        ({"params": T}, TypeError, "params must be a list of tensors, got Tensor"),
        ({"params": [T.int()]}, ValueError, r"params\[0\] must have dtype .*int32"),
        ({"params": [torch.ones(9).as_strided((2, 3), (1, 1))]}, ValueError, r"params\[0\] is wr"),
        ({"params": [T.clone().requires_grad_()]}, RuntimeError, "no derivative"),
        ({"grads": [None]}, TypeError, r"grads\[0\] must be a torch.Tensor, got NoneType"),
        ({"grads": [T, T]}, ValueError, r"grads must have one tensor per param \(1\), got 2"),
        ({"grads": [T[:2]]}, ValueError, r"grads\[0\] must have shape"),
        ({"grads": [T.double()]}, ValueError, r"grads\[0\] must have dtype .*float64"),
        ({"grads": [META]}, ValueError, r"grads\[0\] must be on"),
        ({"grads": [T.to_sparse()]}, ValueError, r"grads\[0\] must be a dense tensor"),
        ({"exp_avgs": [T.half()]}, ValueError, r"exp_avgs\[0\] must have dtype float32"),
        ({"exp_avg_sqs": [T[:2]]}, ValueError, r"exp_avg_sqs\[0\] must have shape"),
        ({"masters": [T.half()]}, ValueError, r"masters\[0\] must have dtype float32"),
        ({"exp_avgs": [T.bfloat16()]}, ValueError, r"exp_avgs\[0\] must have .*with indices"),
        ({"steps": [T[:1]]}, TypeError, "steps must be a torch.Tensor, got list"),
        ({"steps": torch.zeros(1).long()}, ValueError, "steps must have dtype float32"),
        ({"steps": torch.zeros(2)}, ValueError, r"steps must have shape .* = \(1,\)"),
        ({"max_value": 0.0}, ValueError, "max_value must be positive"),
        ({"stochastic_rounding": True}, ValueError, r"indices must have one number per param \(1"),
        ({"indices": [-1]}, ValueError, r"indices must be in \[0, 2\^30\)"),
        ({"lr": T[:1].half()}, ValueError, "lr_tensor must hold one float32"),
        ({"lr": META[:1]}, ValueError, "lr_tensor must be on"),
        ({"inv_scale": 0.5}, TypeError, "inv_scale must be a torch.Tensor, got float"),
        ({"clip": T[:1].double()}, ValueError, "clip must hold one float32"),
        ({"found_inf": torch.zeros(1).bool()}, ValueError, "found_inf must hold one float32"),
    ],
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    args = one(**changes)
    tensors = [t for v in args.values() if isinstance(v, list) for t in v]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(error, match=f"^adamw_: .*{message}"):
        adamw_(**args)  # type: ignore[arg-type]
    for t, saved in zip(tensors, before, strict=True):
        assert t.is_meta or torch.equal(t, saved), "written before the error"
    assert torch.equal(T, torch.ones(3))


def test_nothing_is_written_before_an_error_in_the_last_tensor(backend: str) -> None:
    lists = Lists()
    for i in range(3):
        lists.add((5,), seed=i)
    lists.grads[-1] = lists.grads[-1][:4]
    before = [t.clone() for t in lists.all()]
    with pytest.raises(ValueError, match=r"^adamw_: grads\[2\] must have shape"):
        lists.call()
    for t, saved in zip(lists.all(), before, strict=True):
        assert torch.equal(t, saved)


@given(st.integers(0, 1 << 30), st.integers(1, 30))
def test_split_and_permuted_lists_give_the_same_bits(seed: int, count: int) -> None:
    rng = random.Random(seed)
    lists = Lists()
    for i in range(count):
        lists.add(rng.choice([(0,), (5,), (16, 3)]), torch.bfloat16, moments=torch.bfloat16,
                  step=i % 3, seed=i)  # fmt: skip
    whole = lists.clone()
    whole.call(indices=list(range(count)), stochastic_rounding=True, seed=seed)
    order = rng.sample(range(count), count)
    cut = rng.randrange(count + 1)
    for part in (order[:cut], order[cut:]):
        columns = [[tensors[i] for i in part] for tensors in lists.lists()[:4]]
        adamw_(*columns, [], lists.steps[part], indices=part, stochastic_rounding=True,
               seed=seed, **HYPER)  # fmt: skip
    for got, want in zip(lists.lists(), whole.lists(), strict=True):
        for one, two in zip(got, want, strict=True):
            ind.assert_same_bits(one, two)


def test_nothing_beside_a_tensor_is_touched() -> None:
    """64 elements on either side of every tensor keep their bits."""
    storages = []

    def guarded(x: torch.Tensor) -> torch.Tensor:
        storage = torch.full(((x.numel() + 128) * x.element_size(),), 0xAB, dtype=torch.uint8)
        storages.append((storage, 64 * x.element_size()))
        inside = storage.view(x.dtype)[64:-64]
        inside.copy_(x)
        return inside

    for size in (1, 7, 8, 31, 511, 513, 2000):
        for dtype, master, moments in (
            (torch.float32, False, torch.float32),
            (torch.bfloat16, True, torch.float32),
            (torch.bfloat16, "remainder", torch.bfloat16),
            (torch.bfloat16, False, torch.bfloat16),
            (torch.float64, False, torch.float64),
        ):
            lists = Lists()
            lists.add((size,), dtype, master=master, moments=moments, step=1)
            for tensors in lists.lists():
                tensors[:] = [guarded(t) for t in tensors]
            check(lists, indices=[3], stochastic_rounding=True)
    for storage, guard in storages:
        assert (storage[:guard] == 0xAB).all()
        assert (storage[-guard:] == 0xAB).all()
