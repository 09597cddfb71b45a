"""attention with a mask: values, the bits that other ways to say the same have, what is skipped."""

from __future__ import annotations

import math

import pytest
import torch
from cases import WIDE, for_each, normal, pairwise
from test_attention import check, inputs, run

from mixprec.ops.attention import attention_backward_op, attention_op
from mixprec.testing import assert_close

SHAPES = ((2, 4, 2, 130, 130, 80), (1, 2, 1, 7, 300, 16), (3, 2, 2, 201, 97, 33))
KINDS = ("padding", "window", "packed", "random", "rows", "added", "bias", "fp32")


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    b, h, _, t, s, _ = shape
    i, j = torch.arange(t)[:, None], torch.arange(s)
    if kind == "padding":  # of each sequence another, the first on the left
        end = s - 5 - 29 * torch.arange(b)[:, None]
        sees = torch.where(torch.arange(b)[:, None] == 0, j >= s // 3, j < end)
        return sees[:, None, None].expand(b, 1, t, s)
    if kind == "window":
        return (i - j).abs()[None, None] < 40
    if kind == "packed":  # the first queries and the last keys are of no sequence
        return ((i // 50 == j // 50) & (i >= 3) & (j < s - 3))[None, None]
    random = normal((b, h, t, s), torch.float32, 5)
    if kind == "random":
        return random > 0
    if kind == "rows":  # a tile of queries, and others, see nothing
        return (random[:, :1] > 1) & (i >= 96) & (i % 3 > 0)
    if kind == "added":
        return random[:, :1].masked_fill(random[:, 1:2] > 0.5, -math.inf).to(dtype)
    return random[:1] if kind == "fp32" else random[:1].to(dtype)


@for_each("shape, dtype, kind, causal", pairwise(SHAPES, WIDE, KINDS, (False, True)))
def test_values(
    backend: str, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype, kind: str,
    causal: bool,
) -> None:  # fmt: skip
    check(inputs(shape, dtype), causal, 0.3, mask_of(kind, shape, dtype))


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x, y)  # 0 and -0 are the same


@for_each("shape, dtype", pairwise(SHAPES, WIDE))
def test_bits_do_not_depend_on_how_it_is_said_what_is_seen(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = inputs(shape, dtype)
    b, h, _, t, s, _ = shape
    every = torch.ones(t, s, dtype=torch.bool)
    for sees, causal in ((every, False), (every.tril(), True)):
        want = run(x, causal, 0.3)
        lowest = torch.zeros(t, s).masked_fill(~sees, torch.finfo(dtype).min).to(dtype)
        masks = [
            m.expand(1, 1, t, s)
            for m in (sees, torch.zeros(t, s).masked_fill(~sees, -math.inf), lowest)
        ]
        masks += [
            sees.expand(b, h, t, s),
            sees.expand(b, h, t, s).contiguous(),
            sees.mT.contiguous().mT[None, None],
        ]
        for mask in masks:
            assert all(map(same, run(x, False, 0.3, mask), want))
            assert all(map(same, run(x, causal, 0.3, mask), want))


@for_each("dtype", WIDE)
def test_tiles_that_are_hidden_are_not_computed(dtype: torch.dtype) -> None:
    """NaN reaches no result: in k and v of hidden keys, in q and g of queries that see none."""
    shape = (1, 2, 1, 400, 400, 16)
    x, at = inputs(shape, dtype), torch.arange(400)
    sees = ((at[:, None] < 192) & (at < 192))[None, None]
    for mask in (sees, torch.zeros(sees.shape).masked_fill(~sees, -math.inf)):
        want = run(x, True, 0.3, mask)
        assert all(not y[:, :, 192:].any() for y in want)
        bad = inputs(shape, dtype)
        for y in bad:
            y[:, :, 192:] = math.nan
        assert all(map(same, run(bad, True, 0.3, mask), want))


@for_each("dtype, causal", pairwise(WIDE, (False, True)))
def test_rows_of_the_most_negative_numbers_have_the_mean(
    backend: str, dtype: torch.dtype, causal: bool
) -> None:
    """As where FP32 scores are added to them. They hide keys in rows that see others. (Of fp16 it
    is a number like others.)"""
    x, (t, s) = inputs((2, 2, 2, 150, 120, 16), dtype), (150, 120)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(2, 1, t, s, dtype=dtype).index_fill(3, torch.arange(100, s), lowest)
    mask[1, :, 30:140] = lowest
    mask[1, :, 35:50, 110:] = -math.inf
    for given in (mask, mask.float()):
        wide = [y.float().requires_grad_() for y in x[:3]]
        scores = wide[0] @ wide[1].mT * 0.3 + given.float()
        if causal:
            scores = scores.masked_fill(torch.ones(t, s).triu(1).bool(), -math.inf)
        out = scores.softmax(-1) @ wide[2]
        want = out.detach(), *torch.autograd.grad(out, wide, x.g.float())
        got = run(x, causal, 0.3, given)
        for y, exact in zip(got, want, strict=False):
            unit = (
                1e-5 if dtype == torch.float32 else 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
            )
            assert_close(y, exact.double(), unit * (1 + exact.abs().max()).item())


def test_what_rounding_cuts_off_a_weight_goes_to_a_query_that_sees_the_key(backend: str) -> None:
    """The sums of a key's weights, 1/3, are kept where every fourth query does not see it."""
    q, k = torch.zeros(1, 1, 200, 8).bfloat16(), torch.ones(1, 1, 4, 8).bfloat16()
    sees = (torch.arange(200)[:, None] % 4 != torch.arange(4))[None, None]
    results = attention_op(q, k, k, False, 1.0, sees)
    g = sees[..., :1].expand(q.shape).float()  # only of those that see the first key
    dv = attention_backward_op(g, q, k, k, *results, False, 1.0, sees)[2]
    weights = sees / sees.sum(-1, keepdim=True)
    assert abs(dv[0, 0, 0, 0] - weights[..., 0].sum()) < 2.0**-9 + 1e-4


def test_only_masks_that_fit_are_taken(backend: str) -> None:
    x = inputs((2, 2, 1, 5, 7, 8), torch.bfloat16)
    for shape in ((2, 2, 5, 6), (3, 1, 5, 7), (5, 7), (1, 1, 1, 7)):
        with pytest.raises(ValueError, match=r"mask must have shape \[B or 1, H or 1, T, S\]"):
            attention_op(*x[:3], True, 1.0, torch.ones(shape, dtype=torch.bool))
    results = attention_op(*x[:3], True, 1.0)
    for dtype in (torch.float16, torch.int64):
        mask = torch.ones(1, 1, 5, 7, dtype=dtype)
        with pytest.raises(ValueError, match=r"attention_backward: mask must have dtype bool"):
            attention_backward_op(x.g, *x[:3], *results, True, 1.0, mask)
    for mask in (torch.ones(2, 1, 5, 0).bool(), torch.ones(2, 1, 0, 7)):
        empty = inputs((2, 2, 1, mask.shape[2], mask.shape[3], 8), torch.bfloat16)
        assert not any(y.any() for y in run(empty, False, 1.0, mask)[:4])


@for_each("dtype", WIDE)
def test_opcheck(dtype: torch.dtype) -> None:
    x = inputs((1, 2, 1, 5, 7, 8), dtype)
    for mask in (
        mask_of("rows", (1, 2, 1, 5, 7, 8), dtype),
        mask_of("bias", (1, 2, 1, 5, 7, 8), dtype),
    ):
        args = *x[:3], True, 1.0
        results = attention_op(*args, mask)
        torch.library.opcheck(torch.ops.mixprec.attention.default, (*args, mask))
        backward = (x.g, *x[:3], *results, True, 1.0, mask)
        torch.library.opcheck(torch.ops.mixprec.attention_backward.default, backward)
