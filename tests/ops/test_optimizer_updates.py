"""The optimizers' ops: operation by operation, bit for bit, against a step written in NumPy."""

from __future__ import annotations

import math
import random
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
    contiguous,
    for_each,
    random_bits,
    transposed,
)
from hypothesis import given
from hypothesis import strategies as st
from optimizer_updates import (
    ADAMW,
    BF16,
    F16,
    F32,
    F64,
    LION,
    MUON,
    RULES,
    Lists,
    Rule,
    check,
    decaying,
    every_rule,
    patterns,
)

KINDS = [*((p, g, m) for p in WIDE for g in WIDE for m in (False, True)), (F64, F64, False)]


def all_shapes(param: torch.dtype, grad: torch.dtype, **options: Any) -> Lists:
    """Every shape, and every layout: the same for a param's five tensors, or five others."""
    lists = Lists()
    for i, shape in enumerate((*SHAPES, *[(13, 17)] * len(WRITABLE))):  # the empty ones among them
        layouts = tuple(WRITABLE[(i // 2 if i % 2 else i + j) % len(WRITABLE)] for j in range(5))
        lists.add(shape, param, grad, step=i % 5, layouts=layouts, seed=10 * i, **options)
    return lists


@pytest.mark.parametrize(("param", "grad", "master"), KINDS, ids=str)
@every_rule
def test_every_dtype_mix_and_layout(
    backend: str, rule: Rule, param: torch.dtype, grad: torch.dtype, master: bool
) -> None:
    """Two steps with the rule's numbers, and steps with some of its settings."""
    lists, turn = all_shapes(param, grad, master=master), KINDS.index((param, grad, master))
    check(rule, lists)
    for settings in rule.settings[turn % 3 :: 3]:
        check(rule, lists, **settings)


RANDOM = [
    (F32, False, BF16, False), (F16, True, BF16, True), (BF16, False, BF16, True),
    (BF16, False, BF16, False), (BF16, False, F32, True), (BF16, True, BF16, True),
    (BF16, "remainder", BF16, False), (BF16, "remainder", F32, False),
]  # fmt: skip


@pytest.mark.parametrize(("param", "master", "moments", "stochastic"), RANDOM, ids=str)
@every_rule
def test_bf16_states_remainders_and_stochastic_params(
    backend: str, rule: Rule, param: torch.dtype, master: Any, moments: torch.dtype,
    stochastic: bool,
) -> None:  # fmt: skip
    """Random bits are counted in row-major order whatever the memory order is."""
    lists = all_shapes(param, F32, master=master, moments=moments)
    indices = [(7 * i) % 1000 for i in range(len(lists.params))]
    options = {"indices": indices, "stochastic_rounding": stochastic}
    check(rule, lists, seed=2**62 + 12345, **options)
    check(rule, lists, seed=5, **options, **rule.settings[0])


@decaying
def test_no_decay_leaves_an_infinite_param_alone(backend: str, rule: Rule) -> None:
    """A mask of -inf that is a param: 0 * inf would be NaN."""
    for settings in ({}, {"decoupled_weight_decay": False})[: 2 if rule is ADAMW else 1]:
        lists = Lists()
        lists.add((3,))
        lists.params[0].copy_(torch.tensor([1.0, -math.inf, -0.0]))
        lists.grads[0].copy_(torch.tensor([1.0, 0.0, 0.0]))
        check(rule, lists, weight_decay=0.0, **settings)
        assert lists.params[0][1] == -math.inf


@every_rule
def test_large(two_threads: None, rule: Rule) -> None:
    """For the parallel paths; the same bits in a second run."""
    mixed = (contiguous, transposed, contiguous, transposed, contiguous)
    for dtype, settings in (
        (F64, {"inv_scale": 0.125}),
        (F16, {"inv_scale": 0.125}),
        (BF16, {"indices": [1, 0, 5, 3], "stochastic_rounding": True, "seed": 9}),
    ):
        large = Lists()
        for i, shape in enumerate(LARGE):
            for layouts in (mixed, (contiguous,) * 5):
                moments = dtype if dtype == BF16 else None
                large.add(shape, dtype, master=dtype == F16, moments=moments, step=3, seed=i,
                          layouts=layouts)  # fmt: skip
        again = large.clone()
        check(rule, large, **settings)
        again.call(rule, **settings)
        for one, two in zip(large.all(), again.all(), strict=True):
            ind.assert_same_bits(one, two, f"second run, {dtype}")


def test_bias_correction_at_any_step(backend: str) -> None:
    """Another step for every param of a list; finite where an FP32 counter stands still."""
    for betas in ((0.9, 0.999), (0.95, 0.95), (0.5, 0.99999)):
        lists = Lists()
        for step in (0, 1, 2, 7, 99, 1000, 12345, 999_999, 2**23 - 1, 2**24 - 1):
            for dtype in (F32, F64):
                lists.add((33,), dtype, step=step, seed=step)
        check(ADAMW, lists, beta1=betas[0], beta2=betas[1])
        assert lists.steps.max() == 2.0**24
        lists.call(ADAMW)
        assert all(t.isfinite().all() for t in lists.all())


@every_rule
def test_extreme_values(backend: str, rule: Rule) -> None:
    """Any bit pattern in any role: NaN and Inf included, subnormals not flushed."""
    for dtype in (*WIDE, F64):
        lists = Lists()
        lists.add((20_000,), dtype, step=4)
        tensors = (lists.params[0], lists.grads[0], *(states[0] for states in lists.states))
        for seed, t in enumerate(tensors):
            bits = random_bits(20_000, t.dtype, seed)
            t.copy_(bits.abs() if seed == 3 else bits)
        check(rule, lists)
        check(rule, lists, inv_scale=2.0**20)
        check(rule, lists, max_value=1.0, **({} if rule is MUON else {"weight_decay": 0.0}))


@every_rule
def test_zeros_nan_params_and_no_params(backend: str, rule: Rule) -> None:
    Lists().call(rule)
    for settings in ({}, {"eps": 0.0})[: 2 if rule is ADAMW else 1]:  # 0 / 0 is NaN by the formula
        lists = Lists()
        lists.add((17,))
        lists.grads[0].zero_()
        check(rule, lists, **settings)
    for dtype in (F16, F64):  # what a param with a master held does not matter
        lists = Lists()
        lists.add((9,), dtype, master=True)
        lists.params[0].fill_(math.nan)
        check(rule, lists)


def test_sign(backend: str) -> None:
    """Of 0 it is 0, of -0 too, of NaN NaN."""
    lists = Lists()
    lists.add((5,))
    lists.params[0].copy_(torch.tensor([1.0, -0.0, 2.0, -math.inf, 3.0]))
    lists.grads[0].copy_(torch.tensor([0.0, -0.0, math.nan, 1.0, -1e-45]))
    lists.states[0][0].copy_(torch.tensor([0.0, -0.0, 0.0, 0.0, -1e-45]))
    lists.call(LION, lr=0.5, weight_decay=0.0)
    want = torch.tensor([1.0, -0.0, math.nan, -math.inf, 3.5])
    ind.assert_same_bits(lists.params[0], want)


@every_rule
def test_found_inf_skips_everything(backend: str, rule: Rule) -> None:
    plain, with_masters, remainders = Lists(), Lists(), Lists()
    for i, (param, grad, master) in enumerate(KINDS):
        (with_masters if master else plain).add((5, 7), param, grad, master=master, step=i, seed=i)
    plain.grads[0][0] = math.nan
    for i in range(3):
        remainders.add((i, 33), BF16, master="remainder", moments=BF16, seed=i)
    for each in (plain, with_masters, remainders):
        before = [patterns(t).copy() for t in each.all()]
        for flag in (1.0, 2.0, 0.5, math.inf, math.nan, -1.0):
            each.call(rule, found_inf=flag, inv_scale=0.5, indices=list(range(len(each.params))))
            for t, pattern in zip(each.all(), before, strict=True):
                assert np.array_equal(patterns(t), pattern), f"found_inf {flag}: written to"
    for flag in (0.0, -0.0):
        check(rule, with_masters, found_inf=flag)


T = torch.ones(3)


@for_each(
    "changes, error, message",
    [
        ({"params": T}, TypeError, "params must be a list of tensors, got Tensor"),
        ({"params": [torch.ones(9).as_strided((2, 3), (1, 1))]}, ValueError, r"params\[0\] is wr"),
        ({"params": [T.clone().requires_grad_()]}, RuntimeError, "no derivative"),
        ({"grads": [T, T]}, ValueError, r"grads must have one tensor per param \(1\), got 2"),
        ({"grads": [T[:2]]}, ValueError, r"grads\[0\] must have shape"),
        ({"grads": [T.double()]}, ValueError, r"grads\[0\] must have dtype .*float64"),
        ({"states": [T, T]}, ValueError, r"STATE must have one tensor per param \(1\), got 2"),
        ({"states": T}, TypeError, "STATE must be a list of tensors, got Tensor"),
        ({"states": [T.half()]}, ValueError, r"STATE\[0\] must have dtype float32"),
        ({"states": [T[:2]]}, ValueError, r"STATE\[0\] must have shape"),
        ({"states": [T.bfloat16()]}, ValueError, r"STATE\[0\] must have .*with indices"),
        ({"masters": [T.half()]}, ValueError, r"masters\[0\] must have dtype float32"),
        ({"steps": [T[:1]]}, TypeError, "steps must be a torch.Tensor, got list"),
        ({"steps": torch.zeros(1).long()}, ValueError, "steps must have dtype float32"),
        ({"steps": torch.zeros(2)}, ValueError, r"steps must have shape .* = \(1,\)"),
        ({"max_value": 0.0}, ValueError, "max_value must be positive"),
        ({"stochastic_rounding": True}, ValueError, r"indices must have one number per param \(1"),
        ({"indices": [-1]}, ValueError, r"indices must be in \[0, 2\^30\)"),
        ({"lr": T[:1].half()}, ValueError, "lr_tensor must hold one float32"),
    ],
)
@every_rule
def test_bad_input(rule: Rule, changes: dict, error: type[Exception], message: str) -> None:
    """Of one FP32 param of shape [3]; of the states, the last one is changed."""
    lists = {name: [T.clone()] for name in ("params", "grads", *rule.states)}
    args = {**lists, "masters": [], "steps": torch.zeros(1), **rule.numbers}
    last = rule.states[-1]
    args |= {last if name == "states" else name: value for name, value in changes.items()}
    tensors = [t for v in args.values() if isinstance(v, list) for t in v]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(error, match=f"^{rule}: .*{message.replace('STATE', last)}"):
        rule.op(**args)
    for t, saved in zip(tensors, before, strict=True):
        assert torch.equal(t, saved), "written before the error"
    assert torch.equal(T, torch.ones(3))


@every_rule
def test_nothing_is_written_before_an_error_in_the_last_tensor(backend: str, rule: Rule) -> None:
    lists = Lists()
    for i in range(3):
        lists.add((5,), seed=i)
    lists.grads[-1] = lists.grads[-1][:4]
    before = [t.clone() for t in lists.all()]
    with pytest.raises(ValueError, match=rf"^{rule}: grads\[2\] must have shape"):
        lists.call(rule)
    for t, saved in zip(lists.all(), before, strict=True):
        assert torch.equal(t, saved)


@given(st.sampled_from(RULES), st.integers(0, 1 << 30), st.integers(1, 100), st.booleans())
def test_lists(rule: Rule, seed: int, count: int, masters: bool) -> None:
    """Of mixed dtypes and layouts; split and permuted they give the same bits."""
    rng, lists, dtypes = random.Random(seed), Lists(), WIDE if masters else (*WIDE, F64)
    for i in range(count):
        param, shape = rng.choice(dtypes), rng.choice([(0,), (1,), (), (5, 0), (17,), (16, 3)])
        grad, moments = (F64, F64) if param == F64 else (rng.choice(WIDE), rng.choice([F32, BF16]))
        layouts = tuple(rng.choice(WRITABLE) for _ in range(5))
        lists.add(shape, param, grad, master=masters, moments=moments, step=rng.choice([0, 1, 9]),
                  layouts=layouts, seed=i)  # fmt: skip
    options = {"inv_scale": rng.choice([1.0, 2.0**-12, 0.3]), "seed": seed}
    options["stochastic_rounding"], parts = not masters, lists.clone()
    check(rule, lists, indices=list(range(count)), **options)
    order, cut = rng.sample(range(count), count), rng.randrange(count + 1)
    for part in (order[:cut], order[cut:]):
        params, grads, m, v, exact = ([t[i] for i in part if t] for t in parts.lists())
        steps = parts.steps[part]
        Lists(params, grads, (m, v), exact, steps).call(rule, indices=part, **options)
    for got, want in zip(parts.lists(), lists.lists(), strict=True):
        for one, two in zip(got, want, strict=True):
            ind.assert_same_bits(one, two)


@every_rule
def test_nothing_beside_a_tensor_is_touched(rule: Rule) -> None:
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
            (F32, False, F32),
            (BF16, True, F32),
            (BF16, "remainder", BF16),
            (BF16, False, BF16),
            (F64, False, F64),
        ):
            lists = Lists()
            lists.add((size,), dtype, master=master, moments=moments, step=1)
            for tensors in lists.lists():
                tensors[:] = [guarded(t) for t in tensors]
            check(rule, lists, indices=[3], stochastic_rounding=True)
    for storage, guard in storages:
        assert (storage[:guard] == 0xAB).all()
        assert (storage[-guard:] == 0xAB).all()
