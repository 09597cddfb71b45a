"""The rounding errors of attention's gradients in 16 bits have a mean of zero.

Where maxima of a row repeat, or v and g have one sign, errors that depend on a row or a key alone add
up over the others (Qiu and Yao, 2025, arXiv 2510.04212).
"""

from __future__ import annotations

import pytest
import torch
from cases import for_each

from mixprec.ops.attention import attention_backward_op, attention_op

HEADS, LENGTH, D = 2, 64, 32
Gradients = tuple[torch.Tensor, ...]


def operands(case: str, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the result."""
    random = torch.Generator().manual_seed(seed)

    def normal(length: int = LENGTH) -> torch.Tensor:
        return torch.randn(1, HEADS, length, D, generator=random)

    q, k, v, g = (normal() for _ in range(4))
    if case == "random":
        return q, k, v, g
    g, one = g.abs(), normal(1)
    half = LENGTH // 2
    if case in ("two_max", "three_max"):  # keys that are equal and have most of the weight
        q, v = one * 2 + 0.3 * q, -(1 + v.abs())
        k[:, :, : 2 if case == "two_max" else 3] = one * 2
    elif case == "many_equal":
        q, v = one + 0.3 * q, -v.abs()
        k[:, :, :half] = one * 2
    elif case == "all_equal":
        k[:], v = k[:, :, :1], -(1 + 0.5 * v.abs())
    elif case == "causal_equal":
        k[:, :, :half], v = k[:, :, :1], v.abs()
    elif case == "const_v":
        k[:, :, :half], v = k[:, :, :1], 0.01 * v - 1.7
    return q, k, v, g


CASES = ("two_max", "three_max", "many_equal", "all_equal", "causal_equal", "const_v", "random")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, causal: bool) -> Gradients:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / D**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), g.double())


def errors_along(case: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The signed errors of dq, dk and dv: their means, those along the exact gradient, and those of dq
    along the mean key and of dk along the mean query."""
    q, k, v, g = (x.to(dtype) for x in operands(case, seed))
    causal = case == "causal_equal"
    got = attention_backward_op(g, q, k, v, *attention_op(q, k, v, causal, D**-0.5), causal, D**-0.5)
    found = []
    for x, want, keys in zip(got, exact(q, k, v, g, causal), (k, q, None), strict=True):
        error = x.double() - want
        found += [error.mean(), (error * want).sum() / want.norm()]
        if keys is not None:
            mean = keys.double().mean(-2, keepdim=True)
            found.append((error * mean).sum() / mean.square().sum())
    return torch.stack(found)


def check(case: str, dtype: torch.dtype, seeds: range) -> None:
    """Within four standard errors of zero."""
    errors = torch.stack([errors_along(case, seed, dtype) for seed in seeds])
    bound = 4 * errors.std(0) / len(seeds) ** 0.5
    assert (errors.mean(0).abs() <= bound).all(), (errors.mean(0) / bound * 4).tolist()


@for_each("case", CASES)
def test_errors_have_a_mean_of_zero(backend: str, case: str) -> None:
    check(case, torch.bfloat16, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_errors_of_many_have_a_mean_of_zero(backend: str, case: str, dtype: torch.dtype) -> None:
    check(case, dtype, range(1000, 1240))


@for_each("causal", [False, True])
def test_rounding_keeps_the_sums_of_weights_over_queries(backend: str, causal: bool) -> None:
    """With a gradient of ones dv is such a sum. Rounded one by one, weights of 1/3 are 0.2% off."""
    q, k = torch.zeros(1, 1, 200, 8).bfloat16(), torch.ones(1, 1, 3, 8).bfloat16()
    results = attention_op(q, k, k, causal, 1.0)
    dv = attention_backward_op(torch.ones(q.shape), q, k, k, *results, causal, 1.0)[2]
    seen = torch.ones(200, 3).tril() if causal else torch.ones(200, 3)
    sums = (seen / seen.sum(1, keepdim=True)).sum(0)
    assert (dv[0, 0].T - sums).abs().max() < 2.0**-9 + 1e-4  # the last remainder is not carried on
