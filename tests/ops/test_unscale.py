"""unscale_: g * inv_scale with one rounding, and found_inf for what was or became non-finite."""

from __future__ import annotations

import math
import random

import independent as ind
import numpy as np
import pytest
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


def test_raw_inf_is_found_even_where_the_product_is_finite(backend: str) -> None:
    """A collapsed scale: inf * 0 is NaN; and nothing hides a raw Inf."""
    for inv_scale in (0.0, 1e-30):
        found_inf = torch.zeros(())
        mixprec.unscale_([torch.tensor([1.0, math.inf])], torch.tensor(inv_scale), found_inf)
        assert found_inf.item() == 1.0


ONE, FLAG = torch.ones(()), torch.zeros(1)


@for_each(
    "grads, inv_scale, found_inf, error, message",
    [
        (ONE, ONE, FLAG, TypeError, "grads must be a list of tensors, got Tensor"),
        ([ONE, 1.0], ONE, FLAG, TypeError, r"grads\[1\] must be a torch.Tensor, got float"),
        ([ONE.int()], ONE, FLAG, ValueError, r"grads\[0\] must have dtype .*int32"),
        ([torch.ones(3).to_sparse()], ONE, FLAG, ValueError, r"grads\[0\] must be a dense"),
        ([torch.ones(2, device="meta")], ONE, FLAG, ValueError, r"grads\[0\] must be on"),
        ([ONE.expand(4)], ONE, FLAG, ValueError, r"grads\[0\] is written in place"),
        ([torch.ones(6).as_strided((3, 3), (1, 1))], ONE, FLAG, ValueError, "is written in place"),
        ([ONE], 0.5, FLAG, TypeError, "inv_scale must be a torch.Tensor, got float"),
        ([ONE], ONE.double(), FLAG, ValueError, "inv_scale must hold one float32"),
        ([ONE], ONE.to("meta"), FLAG, ValueError, "inv_scale must be on"),
        ([ONE], ONE, True, TypeError, "found_inf must be a torch.Tensor, got bool"),
        ([ONE], ONE, torch.zeros(2), ValueError, "found_inf must hold one float32"),
        ([ONE], ONE, torch.zeros(1, dtype=torch.bool), ValueError, "found_inf must hold one"),
        ([ONE.clone().requires_grad_()], ONE, FLAG, RuntimeError, "no derivative.*no_grad"),
    ],
)
def test_bad_input(
    grads: object, inv_scale: object, found_inf: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^unscale_: .*{message}"):
        mixprec.unscale_(grads, inv_scale, found_inf)  # type: ignore[arg-type]


def test_nothing_is_written_before_an_error(backend: str) -> None:
    good, found_inf = torch.full((5,), math.inf), torch.zeros(1)
    for last in (torch.ones(1).expand(3), torch.ones(2).int(), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match=r"grads\[1\]"):
            mixprec.unscale_([good, last], torch.tensor(0.0), found_inf)
        assert torch.isinf(good).all()
        assert found_inf.item() == 0.0
