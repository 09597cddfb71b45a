"""The rounding errors of attention's gradients in 16 bits have a mean of zero.

Where maxima of a row repeat, or v and g have one sign, errors that depend on a row or a key alone
add up over the others (Qiu and Yao, 2025, arXiv 2510.04212).
"""

from __future__ import annotations

import torch
from cases import for_each

from mixprec.ops.attention import attention_backward_op, attention_op

HEADS, LENGTH, D = 2, 64, 32
Tensors = tuple[torch.Tensor, ...]


def operands(case: str, seed: int) -> Tensors:
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


def exact(x: Tensors, causal: bool) -> Tensors:
    q, k, v = (y.double().requires_grad_() for y in x[:3])
    scores = q @ k.mT / D**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), x[3].double())


def errors_along(case: str, seed: int) -> torch.Tensor:
    """The signed errors of dq, dk and dv: their means, those along the exact gradient, and those of
    dq along the mean key and of dk along the mean query; in a second row, without the remainder of
    the result."""
    q, k, v, g = (x.bfloat16() for x in operands(case, seed))
    causal = case == "causal_equal"
    out, logsumexp, remainder = attention_op(q, k, v, causal, D**-0.5)
    want, rows = exact((q, k, v, g), causal), []
    for rest in (remainder, remainder.new_empty(0)):
        got = attention_backward_op(g, q, k, v, out, logsumexp, rest, causal, D**-0.5)
        found: list[torch.Tensor] = []
        for x, y, others in zip(got, want, (k, q, None), strict=True):
            error = x.double() - y
            found += [error.mean(), (error * y).sum() / y.norm()]
            if others is not None:
                mean = others.double().mean(-2, keepdim=True)
                found.append((error * mean).sum() / mean.square().sum())
        rows.append(torch.stack(found))
    return torch.stack(rows)


def check(case: str, seeds: range) -> None:
    """Within four standard errors of zero, or 1% of what it is without the remainder: where
    products are FP32, what is left are errors of FP32."""
    errors, without = torch.stack([errors_along(case, seed) for seed in seeds]).unbind(1)
    z = errors.mean(0) / (errors.std(0) / len(seeds) ** 0.5)
    share = errors.mean(0) / without.mean(0)
    assert ((z.abs() <= 4) | (share.abs() <= 0.01)).all(), (z.tolist(), share.tolist())


@for_each("case", CASES)
def test_errors_have_a_mean_of_zero(backend: str, case: str) -> None:
    check(case, range(40))


@for_each("causal", [False, True])
def test_rounding_keeps_the_sums_of_weights_over_queries(backend: str, causal: bool) -> None:
    """With a gradient of ones dv is such a sum. Rounded one by one, weights of 1/3 are 0.2% off."""
    q, k = torch.zeros(1, 1, 200, 8).bfloat16(), torch.ones(1, 1, 3, 8).bfloat16()
    results = attention_op(q, k, k, causal, 1.0)
    dv = attention_backward_op(torch.ones(q.shape), q, k, k, *results, causal, 1.0)[2]
    seen = torch.ones(200, 3).tril() if causal else torch.ones(200, 3)
    sums = (seen / seen.sum(1, keepdim=True)).sum(0)
    assert (dv[0, 0].T - sums).abs().max() < 2.0**-9 + 1e-4  # the last remainder is not carried on
