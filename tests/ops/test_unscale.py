"""unscale_ (g * inv_scale with one rounding) and grad_stats_ (their sums of squares, which reads
alone): found_inf for what was or became non-finite, and the counts of each kind of number."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    GRADS,
    LARGE,
    LAYOUTS,
    SHAPES,
    WRITABLE,
    Layout,
    every_second,
    for_each,
    from_bits,
    normal,
    random_bits,
    random_list,
    transposed,
)
from hypothesis import given
from hypothesis import strategies as st

from mixprec.ops import grad_stats_, unscale_

OPS = (unscale_, grad_stats_)
Op = Callable[..., None]


def sum_of_squares(grad: torch.Tensor, inv_scale: float | None) -> Any:
    """To the roundoff of an FP64 sum of 2^20 squares: far inside one unit of FP32."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            exact = ind.sum_of_squares([grad], inv_scale)
    except OverflowError:
        exact = math.inf
    return pytest.approx(exact, rel=1e-13, abs=0, nan_ok=True)


def check(
    op: Op, grads: list[torch.Tensor], inv_scale: float | None = 1.0, flag: float = 0.0
) -> float:
    """found_inf, after every result is compared with the definition, with and without counts."""
    factor = None if inv_scale is None else float(np.float32(inv_scale))
    kinds = [ind.grad_counts(g, factor, rounded=op is unscale_) for g in grads]
    want = [ind.unscale(g, factor)[0] if op is unscale_ else ind.bits(g).copy() for g in grads]
    sums = [] if op is unscale_ else [sum_of_squares(g, factor) for g in grads]
    counts = torch.full((len(grads), 4), -7)
    found = 1.0 if any(inf or nan for inf, nan, *_ in kinds) else flag
    for tensors, table in (([g.clone() for g in grads], None), (grads, counts)):
        inv, found_inf = None if factor is None else torch.tensor(factor), torch.tensor([flag])
        sum_sq = torch.full((len(sums),), -7.0, dtype=torch.float64)
        op(tensors, inv, found_inf, *([] if op is unscale_ else [sum_sq]), table)
        for i, (grad, bits) in enumerate(zip(tensors, want, strict=True)):
            ind.assert_bits(grad, bits, f"grads[{i}], inv_scale {factor}")
        assert sum_sq.tolist() == sums
        assert found_inf.item() == found
        assert inv is None or inv.item() == factor
    assert counts.tolist() == kinds
    return found


@for_each("op, layout, dtype", itertools.product(OPS, LAYOUTS, GRADS))
def test_shapes_and_layouts(backend: str, op: Op, layout: Layout, dtype: torch.dtype) -> None:
    if op is grad_stats_ or layout in WRITABLE:
        grads = [layout(normal(shape, dtype, seed=i)) for i, shape in enumerate(SHAPES)]
        check(op, grads, 0.3)
        if op is grad_stats_:
            check(op, grads, None)


INV_SCALES = (1.0, 2.0**-16, 2.0**24, 1 / 3, 2.0**-126, 2.0**127, 0.0)


@for_each("op, dtype, inv_scale", itertools.product(OPS, GRADS, INV_SCALES))
def test_values(backend: str, op: Op, dtype: torch.dtype, inv_scale: float) -> None:
    """Of every 16-bit code, or of patterns of every exponent, in tensors of all kinds of length."""
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.smallest_normal / 2, -info.smallest_normal, info.max, math.inf]
    if dtype.itemsize == 2:
        every = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    else:
        every = torch.cat(
            [random_bits(1 << 15, dtype), torch.tensor(edges, dtype=torch.float64).to(dtype)]
        )
    check(op, [every[every.isfinite()]], inv_scale)
    parts = every[:0], every.flip(0), every_second(every[::3]), every[:7].clone()
    check(op, [*parts, torch.ones(3, dtype=dtype)], inv_scale)


@for_each("op, dtype, shape", itertools.product(OPS, GRADS, LARGE))
def test_large(two_threads: None, op: Op, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(shape, dtype)
    check(op, [x.clone(), transposed(x), x[1:].clone()], 2.0**-3)
    for at in (0, x.numel() // 2, x.numel() - 1):
        bad = x.clone()
        bad.view(-1)[at] = math.nan
        check(op, [bad], 0.5)


@given(
    op=st.sampled_from(OPS),
    count=st.integers(1, 100),
    seed=st.integers(0, 1 << 30),
    bad=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    inv_scale=st.sampled_from([1.0, 0.7, 2.0**-10]),
    flag=st.sampled_from([0.0, 1.0]),
)
def test_lists(
    op: Op, count: int, seed: int, bad: float | None, inv_scale: float, flag: float
) -> None:
    """1 to 100 tensors of mixed dtypes and sizes, empty ones anywhere, some strided."""
    rng = random.Random(seed)
    grads = random_list(rng, count)
    victims = [g for g in grads if g.numel()]
    if bad is not None and victims:
        victim = rng.choice(victims)
        victim[rng.randrange(len(victim))] = bad
    check(op, grads, inv_scale, flag)


BAD = (math.nan, math.inf, -math.inf)


@for_each("op, dtype, bad", itertools.product(OPS, GRADS, BAD))
def test_planted_anywhere_or_the_largest(
    backend: str, op: Op, dtype: torch.dtype, bad: float
) -> None:
    for tensor, element in itertools.product((0, 2, -1), (0, 31, -1)):
        grads = [torch.ones(67, dtype=d) for d in (dtype, torch.float32, dtype)]
        grads.insert(1, torch.ones(0, dtype=dtype))
        grads[tensor][element] = bad
        assert check(op, grads, 0.25) == 1.0
    for inv_scale in (1.0, 0.5):  # the squares of which overflow FP32
        assert check(op, [torch.full((100,), torch.finfo(dtype).max, dtype=dtype)], inv_scale) == 0
    for grads in ([], [torch.ones(5)], [torch.ones(0)]):  # the flag is never cleared
        for flag in (0.0, 1.0, 2.0):
            assert check(op, grads, 1.0, flag) == flag


# grad_stats_ does not round the product to the gradient's dtype.
@for_each(
    "value, dtype, inv_scale, found",
    [
        (3e38, torch.float32, 2.0, (1, 1)),
        (1.5e308, torch.float64, 2.0, (1, 1)),
        (3e38, torch.bfloat16, 2.0, (1, 1)),
        (6e4, torch.float16, 2.0, (1, 0)),
        (65504.0, torch.float16, 1.0005, (1, 0)),  # finite in FP32, rounds to Inf in FP16
        (math.inf, torch.float32, 0.0, (1, 1)),
    ],
)
def test_overflow_made_by_unscaling_is_found(
    backend: str, value: float, dtype: torch.dtype, inv_scale: float, found: tuple[int, int]
) -> None:
    for op, flag in zip(OPS, found, strict=True):
        last = torch.ones(40, dtype=dtype)
        last[-1] = value
        assert check(op, [torch.ones(3, dtype=dtype), last], inv_scale) == flag


def test_sums_have_the_same_bits_for_any_number_of_threads() -> None:
    """Of the kernels; the reference sums in torch's order."""
    grads = [normal((n,), d, seed=n) for n in (300_001, 17, 70_000) for d in GRADS]
    grads.append(normal((301, 997), torch.float32).t())
    before = torch.get_num_threads()
    try:
        seen = set()
        for threads in (1, 2, 3, 1, 2):
            torch.set_num_threads(threads)
            sum_sq = torch.zeros(len(grads), dtype=torch.float64)
            grad_stats_(grads, torch.tensor(0.3), torch.zeros(1), sum_sq)
            seen.add(tuple(sum_sq.tolist()))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


def test_the_shape_of_scalars_is_free(backend: str) -> None:
    for shape in ((), (1,), (1, 1)):
        found_inf, sum_sq = torch.zeros(shape), torch.zeros(1, dtype=torch.float64)
        grad_stats_([torch.tensor([2.0, math.nan])], torch.ones(shape), found_inf, sum_sq)
        assert found_inf.item() == 1.0
