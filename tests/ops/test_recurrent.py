"""recurrent and recurrent_backward: each step against FP64, from the state that the op rounded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import independent as ind
import pytest
import torch
from cases import for_each, normal, pairwise, small_integers

from mixprec.ops._reference.recurrent import CELLS
from mixprec.ops.recurrent import GATES, recurrent_backward_op, recurrent_op
from mixprec.testing import assert_close

LOW = (torch.bfloat16, torch.float16)
# Steps, batch, units: one of each; parts of vectors, panels and blocks; batches that grow shorter.
SHAPES: tuple[tuple[int | tuple[int, ...], int, int], ...] = (
    *((1, 1, 1), (3, 2, 5), (4, 17, 33), (2, 70, 100), (3, 33, 224), (2, 3, 257)),
    *(((5, 5, 4, 1), 5, 40), ((31, 30, 14, 13, 1, 1), 31, 19)),
)
CASES = pairwise(tuple(GATES), SHAPES, LOW, (False, True))
ULPS = 2.0**-22  # of a step: some operations in FP32, and exponentials within a few units


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    h: torch.Tensor
    c: torch.Tensor | None
    sizes: torch.Tensor | None
    cell: str
    reverse: bool


def inputs(cell: str, shape: Any, low: torch.dtype, reverse: bool, make: Any = normal) -> Inputs:
    steps, batch, units = shape
    sizes = torch.tensor(steps) if isinstance(steps, tuple) else None
    rows = steps * batch if sizes is None else sum(steps)
    gates = GATES[cell] * units
    x, h, c = (make(n, torch.float32) for n in ((rows, gates), (batch, units), (batch, units)))
    weight = make((gates, units), torch.float32, 5) * (units**-0.5 if make is normal else 1)
    bias = make((units,), torch.float32, 6) if cell == "gru" else None
    return Inputs(x, weight.to(low), bias, h, c if cell == "lstm" else None, sizes, cell, reverse)


def forward(a: Inputs, save: bool = True, out: torch.dtype = torch.float32) -> Any:
    return recurrent_op(*a[:6], a.cell, a.reverse, save, out)


def backward(a: Inputs, saved: torch.Tensor, g: torch.Tensor) -> Any:
    state = normal(a.h.shape, torch.float32, 8)
    dc_now = None if a.c is None else normal(a.h.shape, torch.float32, 9)
    return state, dc_now, recurrent_backward_op(
        g, state, dc_now, a.weight, saved, a.sizes, a.cell, a.reverse
    )  # fmt: skip


def steps_of(a: Inputs, reverse: bool) -> list[slice]:
    batch = a.h.shape[0]
    sizes = [batch] * (a.x.shape[0] // batch) if a.sizes is None else a.sizes.tolist()
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    steps = [slice(*pair) for pair in itertools.pairwise(ends)]
    return steps[::-1] if reverse else steps


@for_each("cell, shape, low, reverse", CASES)
def test_each_step(
    backend: str, poisoned: None, cell: str, shape: Any, low: torch.dtype, reverse: bool
) -> None:
    a = inputs(cell, shape, low, reverse)
    out, h_n, c_n, h_prev, saved = forward(a)
    step_of, units = CELLS[cell], a.h.shape[1]
    h, wide = a.h.clone(), a.weight.double()
    c = torch.zeros_like(h).double() if a.c is None else a.c.double()
    for step in steps_of(a, reverse):
        b = step.stop - step.start
        ind.assert_same_bits(h_prev[step], h[:b].to(low))
        sums = (h_prev[step].double() @ wide.t()).unflatten(1, (-1, units))
        x = a.x[step].double().unflatten(1, (-1, units))
        bias = None if a.bias is None else a.bias.double()
        new, new_c, kept = step_of.step(x, sums, h[:b].double(), c[:b], bias)
        sum_bound = h_prev[step].double().abs() @ wide.abs().t() * units * 2.0**-23
        bound = (sum_bound.unflatten(1, (-1, units)) + ULPS * (x.abs() + 1)).amax(1) * 4
        bound = bound + ULPS * (h[:b].abs() + c[:b].abs())
        assert_close(out[step], new, bound)
        assert_close(saved[step], torch.cat(kept, 1), bound.repeat(1, step_of.saved) * 2)
        h[:b] = out[step]
        if new_c is not None:
            c[:b] = new_c
    ind.assert_same_bits(h_n, h)
    assert a.c is None or assert_close(c_n, c, 1e-4) is None
    for given in LOW:  # rounded once; without what backward reads, the rest is the same
        short = forward(a, False, given)
        ind.assert_same_bits(short[0], out.to(given))
        ind.assert_same_bits(short[1], h_n)
        assert [t.shape[0] for t in short[3:]] == [0, 0]


@for_each("cell, shape, low, reverse", CASES)
def test_each_step_of_backward(
    backend: str, poisoned: None, cell: str, shape: Any, low: torch.dtype, reverse: bool
) -> None:
    a = inputs(cell, shape, low, reverse)
    saved = forward(a)[4]
    g = normal((a.x.shape[0], a.h.shape[1]), torch.float32, 7)
    g_h, g_c, (dx, dgates, dh, dc) = backward(a, saved, g)
    grads_of, units = CELLS[cell].grads, a.h.shape[1]
    dh_now, dc_now = g_h.double(), torch.zeros_like(g_h).double() if g_c is None else g_c.double()
    size = dh_now.abs() + dc_now.abs() + g.abs().amax()
    for step in steps_of(a, not reverse):
        b = step.stop - step.start
        kept = [t.double() for t in saved[step].chunk(CELLS[cell].saved, 1)]
        dx_now, ds_now, rest, new_c = grads_of(kept, g[step].double() + dh_now[:b], dc_now[:b])
        bound = (size[:b] * (1 + sum(t.abs() for t in kept))).amax(1, keepdim=True) * 2.0**-18
        assert_close(dx[step], torch.cat(dx_now, 1), bound)
        rounded = bound + torch.finfo(low).eps * torch.cat(ds_now, 1).abs() + torch.finfo(low).tiny
        assert_close(dgates[step], torch.cat(ds_now, 1), rounded)
        dh_now[:b] = dgates[step].double() @ a.weight.double()
        dh_now[:b] += 0 if rest is None else rest
        dc_now[:b] = 0 if new_c is None else new_c
        size[:b] += dh_now[:b].abs() + dc_now[:b].abs() + (rest is not None) * size[:b]
    assert_close(dh, dh_now, size.amax(1, keepdim=True) * 2.0**-18)
    assert g_c is None or assert_close(dc, dc_now, size.amax(1, keepdim=True) * 2.0**-18) is None
    assert dx.shape[1] == GATES[cell] * units


@for_each("shape, low, reverse", pairwise(SHAPES, LOW, (False, True)))
def test_integers_are_exact(shape: Any, low: torch.dtype, reverse: bool) -> None:
    """Of a layer with ReLU: no order of sums changes a bit of any step."""
    a = inputs("relu", shape, low, reverse, lambda n, dtype, seed=0: small_integers(n, dtype, 2))
    a = a._replace(weight=(torch.eye(*a.weight.shape) * 2 - 1).to(low).roll(1, 0))
    every = forward(a)
    rows = normal((a.x.shape[0], a.h.shape[1]), torch.float32, 3).round()
    grads = recurrent_backward_op(rows, a.h, None, a.weight, every[4], *a[5:])
    want = recurrent_op.handle("reference")(*a[:6], "relu", reverse, True, torch.float32)
    want_grads = recurrent_backward_op.handle("reference")(
        rows, a.h, None, a.weight, every[4], *a[5:]
    )
    for got, exact in zip((*every, *grads), (*want, *want_grads), strict=True):
        ind.assert_same_bits(got, exact)


def test_layouts_and_threads_change_no_bit(set_threads: Callable[[int], None]) -> None:
    for cell in GATES:
        a = inputs(cell, (3, 40, 200), torch.bfloat16, False)
        strided = a._replace(weight=a.weight.t().contiguous().t(), x=a.x.t().contiguous().t())
        results = []
        for threads in (1, 2, 5):
            set_threads(threads)
            for one in (a, strided):
                kept = forward(one)
                g = kept[0].t().contiguous().t()
                results.append((*kept, *backward(one, kept[4], g)[2]))
        for result in results[1:]:
            for got, want in zip(result, results[0], strict=True):
                ind.assert_same_bits(got, want)


def test_no_steps(backend: str) -> None:
    for cell in GATES:
        a = inputs(cell, (0, 3, 4), torch.bfloat16, False)
        out, h_n, c_n, _, saved = forward(a)
        assert out.shape == (0, 4)
        assert torch.equal(h_n, a.h)
        assert a.c is None or torch.equal(c_n, a.c)
        g_h, g_c, (_, _, dh, dc) = backward(a, saved, out)
        assert torch.equal(dh, g_h)
        assert g_c is None or torch.equal(dc, g_c)


@for_each("cell, bad", pairwise(tuple(GATES), (math.nan, math.inf)))
def test_no_overflow_is_hidden(backend: str, cell: str, bad: float) -> None:
    """A gradient that fp16 cannot hold, and Inf or NaN in one step, reach the earlier ones."""
    a = inputs(cell, (4, 3, 20), torch.float16, False)
    a = a._replace(x=a.x.abs() / 9, weight=a.weight.abs())
    saved = forward(a)[4]
    g = torch.zeros(12, 20)
    for value in (bad, 1e30):
        g[9] = value
        dx, dgates, dh, _ = backward(a, saved, g)[2]
        assert not dgates[9].isfinite().any()
        assert not dx[[0, 3, 6]].isfinite().all(1).any()
        assert not dh[0].isfinite().all()
        assert dx[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": "gru2"}, "cell must be one of lstm, gru, tanh, relu, got 'gru2'"),
        ({"weight": torch.zeros(20, 4).bfloat16()}, r"weight must have shape \[G \* H, H\]"),
        ({"weight": torch.zeros(16, 4)}, "weight must have dtype"),
        ({"x": torch.zeros(6, 15)}, "x must have shape"),
        ({"x": torch.zeros(7, 16)}, "rows must be a multiple of B = 3, got 7"),
        ({"c": None}, "c must be a tensor for an LSTM"),
        ({"c": torch.zeros(2, 4)}, "c must have shape"),
        ({"bias": torch.zeros(4)}, "bias must be None except for a GRU"),
        ({"sizes": torch.tensor([3, 4])}, "batch_sizes must not increase"),
        ({"sizes": torch.tensor([3, 0, 3])}, "batch_sizes must not increase"),
        ({"sizes": torch.tensor([3, 2])}, "their sum must be the rows, 6"),
    ],
)
def test_errors(backend: str, change: dict[str, Any], message: str) -> None:
    a = inputs("lstm", (2, 3, 4), torch.bfloat16, False)._replace(**change)
    with pytest.raises(ValueError, match=message):
        forward(a)
