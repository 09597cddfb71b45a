"""unscale_: g * inv_scale with one rounding, and found_inf for what was or became non-finite."""

from __future__ import annotations

import math
import random

import independent as ind
import numpy as np
import torch
from cases import (
    GRADS,
    LARGE,
    SHAPES,
    WRITABLE,
    Layout,
    for_each,
    from_bits,
    normal,
    random_bits,
    random_list,
)
from hypothesis import given
from hypothesis import strategies as st

import mixprec

INV_SCALES = (1.0, 2.0**-16, 2.0**24, 1 / 3, 2.0**-126, 2.0**127, 0.0)


def run(grads: list[torch.Tensor], inv_scale: float, flag: float = 0.0) -> None:
    """Unscale in place and compare every bit, the counts and the flag, with and without counts."""
    inv_scale = float(np.float32(inv_scale))
    wanted = [ind.unscale(g, inv_scale) for g in grads]
    kinds = [ind.grad_counts(g, inv_scale, rounded=True) for g in grads]
    inv, copies = torch.tensor(inv_scale), [g.clone() for g in grads]
    counts = torch.full((len(grads), 4), -7)
    for tensors, table in ((grads, counts), (copies, None)):
        found_inf = torch.tensor([flag])
        mixprec.unscale_(tensors, inv, found_inf, table)
        for i, (grad, (want, _)) in enumerate(zip(tensors, wanted, strict=True)):
            ind.assert_bits(grad, want, f"grads[{i}] * {inv_scale}")
        assert found_inf.item() == (1.0 if any(bad for _, bad in wanted) else flag)
    assert counts.tolist() == kinds
    assert inv.item() == inv_scale


@for_each("layout", WRITABLE)
@for_each("dtype", GRADS)
def test_shapes_and_layouts(backend: str, dtype: torch.dtype, layout: Layout) -> None:
    run([layout(normal(shape, dtype, seed=i)) for i, shape in enumerate(SHAPES)], 0.3)


@for_each("inv_scale", INV_SCALES)
@for_each("dtype", GRADS)
def test_values(backend: str, dtype: torch.dtype, inv_scale: float) -> None:
    if dtype in (torch.float16, torch.bfloat16):
        every = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    else:
        every = random_bits(1 << 15, dtype)
    with np.errstate(over="ignore"):
        finite = every[np.isfinite(ind.values(every))]
    run([finite.clone()], inv_scale)
    run([every.clone()], inv_scale)


@for_each("dtype", GRADS)
def test_large(two_threads: None, dtype: torch.dtype) -> None:
    for shape in LARGE:
        x = normal(shape, dtype)
        y = x.t().contiguous().t() if x.dim() == 2 else x[1:].clone()
        run([x.clone(), y], 2.0**-3)
        for at in (0, x.numel() // 2, x.numel() - 1):
            bad = x.clone()
            bad.view(-1)[at] = math.nan
            run([bad], 0.5)


@given(
    count=st.integers(1, 100),
    seed=st.integers(0, 1 << 30),
    bad=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    inv_scale=st.sampled_from([1.0, 0.7, 2.0**-10]),
    flag=st.sampled_from([0.0, 1.0]),
)
def test_lists(count: int, seed: int, bad: float | None, inv_scale: float, flag: float) -> None:
    """1 to 100 tensors of mixed dtypes and sizes, empty ones anywhere, some strided."""
    rng = random.Random(seed)
    grads = random_list(rng, count)
    victims = [g for g in grads if g.numel()]
    if bad is not None and victims:
        victim = rng.choice(victims)
        victim[rng.randrange(len(victim))] = bad
    run(grads, inv_scale, flag)


@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("dtype", GRADS)
def test_planted_anywhere_or_the_largest(backend: str, dtype: torch.dtype, bad: float) -> None:
    for tensor in (0, 2, -1):
        for element in (0, 31, -1):
            grads = [torch.ones(67, dtype=d) for d in (dtype, torch.float32, dtype)]
            grads.insert(1, torch.ones(0, dtype=dtype))
            grads[tensor][element] = bad
            run(grads, 1.0)
    for inv_scale in (1.0, 0.5):
        run([torch.full((100,), torch.finfo(dtype).max, dtype=dtype)], inv_scale)
    for grads in ([], [torch.ones(5)]):  # the flag is never cleared
        for flag in (0.0, 1.0, 2.0):
            run(grads, 1.0, flag)


def test_overflow_made_by_unscaling_is_found(backend: str) -> None:
    for value, dtype, inv_scale in (
        *((3e38, torch.float32, 2.0), (6e4, torch.float16, 2.0), (3e38, torch.bfloat16, 2.0)),
        (1.5e308, torch.float64, 2.0),
        (65504.0, torch.float16, 1.0005),  # finite in FP32, rounds to Inf in FP16
    ):
        grads = [torch.ones(3, dtype=dtype), torch.full((40,), 1.0, dtype=dtype)]
        grads[1][-1] = value
        run(grads, inv_scale)
        assert torch.isinf(grads[1][-1])
