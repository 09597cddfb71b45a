"""attention and attention_backward against FP64, with tolerances derived from their sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import independent as ind
import torch
from cases import WIDE, for_each, normal, pairwise

from mixprec.ops._dispatch.library import C
from mixprec.ops.attention import attention_backward_op, attention_op
from mixprec.testing import FP32_ROUNDOFF, assert_close

# B, H, H_kv, T, S, D: one key, tiles of 96 with and without a rest, groups of heads.
SHAPES = (
    *((1, 1, 1, 1, 1, 8), (3, 2, 1, 7, 7, 20), (1, 4, 2, 65, 65, 64), (1, 2, 2, 130, 130, 80)),
    *((1, 2, 1, 96, 96, 128), (2, 3, 3, 97, 200, 16), (1, 1, 1, 200, 97, 33)),
)
CASES = pairwise(SHAPES, WIDE, (False, True), (0.3, None, -0.2), (False, True, True, False))


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Inputs:
    b, h, h_kv, t, s, d = shape
    sizes = ((b, t, h, d), (b, s, h_kv, d), (b, s, h_kv, d), (b, t, h, d))
    return Inputs(*(normal(n, dtype, seed + i).transpose(1, 2) for i, n in enumerate(sizes)))


def rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    return (info.eps * x.abs()).clamp(min=info.smallest_normal * info.eps)


class Expected:
    """The results in FP64, by torch's autograd, and the error that each may have.

    An FP32 sum of n products is off by 2 n units of roundoff u of the sum of their magnitudes
    (mixprec.testing). An error e of the scores of a row changes its weights by 2 e of themselves;
    where bf16 operands are multiplied by bf16 instructions, weights and the gradients of scores are
    rounded to bf16; for dv with what rounding has cut off the query before. The logsumexp of a row
    that sees no key is 0.
    """

    def __init__(
        self, x: Inputs, causal: bool, scale: float, mask: torch.Tensor | None = None
    ) -> None:
        dtype, u, (t, d), s = x.q.dtype, FP32_ROUNDOFF, x.q.shape[2:], x.k.shape[2]
        group = x.q.shape[1] // x.k.shape[1]
        low = dtype == torch.bfloat16 and C is not None and C.isa() == "avx512_bf16"
        coarse = 2.0**-8 if low else 0.0

        def each(y: torch.Tensor) -> torch.Tensor:
            return y.repeat_interleave(group, 1)

        def by_group(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(1, (-1, group)).sum(2)

        q, k, v = (y.detach().double().requires_grad_() for y in x[:3])
        g = x.g.to(dtype).double()
        scores = q @ each(k).mT * scale
        seen = torch.ones(t, s, dtype=torch.bool).tril() if causal else torch.ones(t, s).bool()
        added = torch.zeros(1)
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            seen = seen & (mask if is_bool else mask > -torch.inf)
            added = added if is_bool else mask.masked_fill(~seen, 0.0).double()
        sees = seen.any(-1, keepdim=True)
        scores = (scores + added).masked_fill(~seen & sees, -torch.inf)
        self.logsumexp = torch.where(sees[..., 0], scores.logsumexp(-1), 0.0).detach()
        weights = scores.softmax(-1) * sees
        out = weights @ each(v)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
        p, aq, ak, av, ag = (y.detach().abs() for y in (weights, q, each(k), each(v), g))
        magnitude = (aq @ ak.mT * abs(scale) + added.abs()).masked_fill(~seen, 0.0)
        worst = ((2 * d + 6) * u * magnitude).amax(-1, keepdim=True)
        # Of the weights; those that are subnormal may be 0.
        of_p = ((2 * worst + (2 * s + 8) * u + coarse) * p + 2.0**-125) * seen
        of_out = of_p @ av + 2 * s * u * (p @ av) + rounding(out, dtype)
        of_weights, shared = g @ each(v).mT, (g * out).sum(-1, keepdim=True)
        slope = (of_weights - shared).abs() * abs(scale)
        ds = p * slope
        of_slope = (2 * d + 4) * u * (ag @ av.mT + (ag * out.abs()).sum(-1, keepdim=True))
        of_slope = (of_slope + (ag * of_out).sum(-1, keepdim=True)) * abs(scale)
        of_ds = of_p * slope + 4 * u * ds + p * of_slope
        # Without rounding, the gradients of the scores of a query add up to 0.
        self.of_sum = (of_ds.sum(-1) + 2 * s * u * ds.sum(-1)).detach()
        of_dq = of_ds @ ak + 2 * s * u * (ds @ ak)
        of_dk = by_group(of_ds.mT @ aq + 2 * t * group * u * (ds.mT @ aq))
        carried, rest = torch.zeros_like(p), torch.zeros_like(p[:, :, 0])
        for i in range(t):
            carried[:, :, i] = rest * seen[..., i, :]
            rest = torch.where(seen[..., i, :], coarse * (p[:, :, i] + rest), rest)
        of_dv = by_group((of_p + carried).mT @ ag + 2 * t * group * u * (p.mT @ ag))
        self.of_logsumexp = worst[..., 0] + (2 * s + 8) * u * (1 + self.logsumexp.abs())
        self.results = [y.detach() for y in (out, dq, dk, dv)]
        bounds = ((dq, of_dq), (dk, of_dk), (dv, of_dv))
        self.bounds = [of_out.detach(), *((b + rounding(y, x.g.dtype)).detach() for y, b in bounds)]


def run(
    x: Inputs, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv, logsumexp"""
    results = attention_op(*x[:3], causal, scale, mask)
    grads = attention_backward_op(x.g, *x[:3], *results, causal, scale, mask)
    return results[0], *grads, results[1]


def check(x: Inputs, causal: bool, scale: float, mask: torch.Tensor | None = None) -> None:
    got, want = run(x, causal, scale, mask), Expected(x, causal, scale, mask)
    dtypes = x.q.dtype, *[x.g.dtype] * 3
    for y, exact, bound, dtype in zip(got, want.results, want.bounds, dtypes, strict=False):
        assert y.dtype == dtype
        assert y.transpose(1, 2).is_contiguous()
        assert_close(y, exact, bound)
    assert_close(got[4], want.logsumexp, want.of_logsumexp)


@for_each("shape, dtype, causal, scale, wide", CASES)
def test_values(
    backend: str, poisoned: None, shape: tuple[int, ...], dtype: torch.dtype, causal: bool,
    scale: float | None, wide: bool,
) -> None:  # fmt: skip
    """The gradients have the dtype of g, which may be FP32."""
    x = inputs(shape, dtype)
    x = x._replace(g=inputs(shape, torch.float32, 9).g) if wide else x
    check(x, causal, shape[-1] ** -0.5 if scale is None else scale)


@for_each("t, s, dtype", pairwise((1, 3, 100), (1, 100), WIDE))
def test_a_query_that_sees_one_key_has_scores_without_a_gradient(
    backend: str, t: int, s: int, dtype: torch.dtype
) -> None:
    """Its weight is 1 whatever the score: dp - sum(g * out) is 0, also with g in FP32."""
    if backend == "reference" and dtype == torch.float32:
        return  # two FP32 products, summed in orders of their own
    for d in (8, 33, 80):
        x = inputs((2, 2, 1, t, s, d), dtype)._replace(g=normal((2, 2, t, d), torch.float32, 9))
        _, dq, dk, _, _ = run(x, True, 0.3)
        assert not dq[:, :, 0].any()
        if s == 1:
            assert not run(x, False, 0.3)[1].any()
            assert not dk.any()


@for_each("dtype, causal", pairwise(WIDE, (False, True)))
def test_the_gradients_of_the_scores_of_a_query_add_up_to_0(
    backend: str, dtype: torch.dtype, causal: bool
) -> None:
    """A feature of 1 in every key makes their sum an element of dq."""
    for shape in SHAPES:
        x = inputs(shape, dtype)._replace(g=inputs(shape, torch.float32, 9).g)
        x.k[..., 0] = 1
        assert_close(
            run(x, causal, 0.3)[1][..., 0],
            torch.zeros(x.q.shape[:3], dtype=torch.float64),
            Expected(x, causal, 0.3).of_sum,
        )


def test_rounded_weights_add_up_over_queries(backend: str) -> None:
    """To those that are not: 1000 times 1/3, which bf16 has not."""
    x = inputs((1, 1, 1, 1000, 3, 16), torch.bfloat16)
    x = x._replace(k=torch.zeros_like(x.k), g=torch.ones_like(x.g, dtype=torch.float32))
    dv = run(x, False, 1.0)[3]
    assert_close(dv, torch.full_like(dv, 1000 / 3).double(), torch.full_like(dv, 0.01).double())


@for_each("causal", [False, True])
def test_large_scores(backend: str, causal: bool) -> None:
    """exp(score) overflows FP32: only differences to the maximum are exponentiated."""
    x = inputs((1, 2, 2, 130, 130, 32), torch.float32)
    check(x._replace(q=x.q * 30), causal, 1.0)
    far = x._replace(q=x.q.abs() * 100, k=x.k.abs().cumsum(2))  # the maximum grows with every tile
    check(far, causal, 1.0)


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """x [B, H, T, D] in other layouts, with NaN between the rows or at an odd address."""
    b, h, t, d = x.shape
    qkv = torch.full((b, t, 3, h, d), math.nan, dtype=x.dtype)
    qkv[:, :, 1] = x.transpose(1, 2)
    odd = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    odd[1:] = x.reshape(-1)
    by_column = x.mT.contiguous().mT
    return [x.contiguous(), qkv[:, :, 1].transpose(1, 2), odd[1:].view(x.shape), by_column]


@for_each("dtype, causal", pairwise(WIDE, (False, True)))
def test_layouts_and_threads_change_no_bit(
    set_threads: Callable[[int], None], dtype: torch.dtype, causal: bool
) -> None:
    """Also with more threads than heads of k, which then share a head."""
    x = inputs((1, 4, 2, 300, 200, 24), dtype)
    all_layouts = [Inputs(*several) for several in zip(*map(views, x), strict=True)]
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        results += [run(one, causal, 0.2) for one in all_layouts]
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            ind.assert_same_bits(got, want)


def test_expanded_operands(backend: str) -> None:
    x = inputs((2, 2, 2, 40, 40, 16), torch.float32)
    x = x._replace(k=x.k[:1, :1].expand_as(x.k), v=x.v[:, :, :1].expand_as(x.v))
    check(x, True, 0.3)


@for_each("causal", [False, True])
def test_nothing_to_attend_to(backend: str, poisoned: None, causal: bool) -> None:
    for t, s in ((3, 0), (0, 3), (0, 0)):
        out, dq, dk, dv, logsumexp = run(inputs((2, 2, 1, t, s, 8), torch.float32), causal, 1.0)
        assert (out.shape, dq.shape, dk.shape) == ((2, 2, t, 8), (2, 2, t, 8), (2, 1, s, 8))
        assert not any(y.any() for y in (out, dq, dk, dv))
        assert (logsumexp == -math.inf).all()
    out, logsumexp, _ = attention_op(*(torch.ones(0, 2, 3, 8),) * 3, causal, 1.0)
    assert (out.shape, logsumexp.shape) == ((0, 2, 3, 8), (0, 2, 3))


@for_each("dtype, bad, name", pairwise(WIDE, (math.nan, math.inf, -math.inf), ("q", "k", "v", "g")))
def test_no_overflow_is_hidden(backend: str, dtype: torch.dtype, bad: float, name: str) -> None:
    """Where the results in FP64 are not finite, neither are ours: for every argument and tile."""
    for at, seed in ((0, 1), (100, 2), (129, 3)):
        x = inputs((1, 1, 1, 130, 130, 16), dtype, seed)
        getattr(x, name)[0, 0, at, 5] = bad
        got, want = run(x, False, 0.25), Expected(x, False, 0.25).results
        assert any(not y.isfinite().all() for y in want)
        for y, exact in zip(got, want, strict=False):
            assert not y[~exact.isfinite()].isfinite().any()
        causal = run(x, True, 0.25)
        assert not all(y.isfinite().all() for y in causal)
        if name == "v":
            assert not causal[0][:, :, at:, 5].isfinite().any()
            early = causal[0][:, :, : max(0, at - 16)]  # the reference multiplies by weights of 0
            assert backend == "reference" or early.isfinite().all()


def test_rows_with_weights_of_zero(backend: str) -> None:
    """Scores of -inf count nothing, even if a whole tile of keys has them; a row of them is NaN."""
    x = inputs((1, 1, 1, 4, 200, 8), torch.float32)
    q, k = x.q.abs(), x.k.clone()
    k[:, :, :150] = -math.inf
    out, logsumexp, _ = attention_op(q, k, x.v, False, 1.0)
    alone, of_alone, _ = attention_op(q, k[:, :, 150:], x.v[:, :, 150:], False, 1.0)
    assert_close(out, alone.double(), 1e-5)
    assert_close(logsumexp, of_alone.double(), 1e-5)
    assert attention_op(q, torch.full_like(k, -math.inf), x.v, False, 1.0)[0].isnan().all()
