"""functional.attention: what torch's scaled_dot_product_attention gives, in every mode of torch."""

from __future__ import annotations

from typing import Any

import independent as ind
import pytest
import torch
from cases import WIDE, for_each, normal, pairwise
from torch.nn.functional import scaled_dot_product_attention

from mixprec.functional import attention
from mixprec.functional._attention import run_attention

Tensors = tuple[torch.Tensor, ...]
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def operands(dtype: torch.dtype = torch.float32, heads: int = 2, t: int = 9) -> Tensors:
    sizes = ((2, 4, t, 16), (2, heads, t, 16), (2, heads, t, 16))
    return tuple(normal(s, dtype, i).requires_grad_() for i, s in enumerate(sizes))


def with_grads(function: Any, args: Tensors, **options: Any) -> Tensors:
    y = function(*args, **options)
    g = normal(tuple(y.shape), y.dtype, seed=7)
    return y.detach(), *torch.autograd.grad(y, args, g)


@for_each("dtype, causal, heads", pairwise(WIDE, (False, True), (1, 2, 4)))
def test_as_torch(backend: str, dtype: torch.dtype, causal: bool, heads: int) -> None:
    args = operands(dtype, heads)
    wide = tuple(x.detach().double().requires_grad_() for x in args)
    for scale in (None, 0.1):
        got = with_grads(attention, args, causal=causal, scale=scale)
        want = with_grads(
            scaled_dot_product_attention, wide, is_causal=causal, scale=scale, enable_gqa=True
        )
        for y, exact in zip(got, want, strict=True):
            assert y.dtype == dtype
            assert (y.double() - exact).abs().max() <= UNIT[dtype] * (1 + exact.abs().max())
    assert got[0].transpose(1, 2).is_contiguous()


def test_what_the_kernel_does_not_take_is_torchs() -> None:
    q, k, v = operands(torch.float64)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, causal=True), want)
    q, k, v = (x[:, :2].detach() for x in operands(heads=2))
    assert attention(q[0], k[0], v[0]).shape == q[0].shape
    assert attention(q, k, v[..., :3]).shape == (*q.shape[:3], 3)
    by_torch = torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    by_hand = torch.func.grad(lambda q: ((q @ k.mT / 4).softmax(-1) @ v).sum())(q)
    assert torch.allclose(by_torch, by_hand, atol=1e-6)
    with pytest.raises(RuntimeError):
        attention(q, k.half(), v)


@for_each("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_what_requires_a_gradient_gets_one(wanted: tuple[int, ...]) -> None:
    args = operands()
    every = with_grads(attention, args)[1:]
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(args)]
    g = normal((2, 4, 9, 16), torch.float32, seed=7)
    attention(*some).backward(g)
    for i, x in enumerate(some):
        assert (x.grad is not None) == (i in wanted)
        if x.grad is not None:
            ind.assert_same_bits(x.grad, every[i])


@for_each("low", [torch.bfloat16, torch.float16])
def test_one_key_gives_no_gradient_to_q_and_k_of_an_fp32_model(
    backend: str, low: torch.dtype
) -> None:
    args = [x[:, :, :1].detach().requires_grad_() for x in operands(heads=4)]
    y = run_attention(*args, False, None, low)
    dq, dk, dv = torch.autograd.grad(y, args, normal(tuple(y.shape), torch.float32, 7))
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


def test_second_derivative_is_refused() -> None:
    q, k, v = operands()
    y = attention(q, k, v)
    with pytest.raises(RuntimeError, match=r"no derivative.*SDPBackend\.MATH"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_operands(dtype: torch.dtype) -> None:
    args = operands(heads=4)
    low = tuple(x.detach().to(dtype).requires_grad_() for x in args)
    want = with_grads(attention, low, causal=True)
    with torch.autocast("cpu", dtype):
        got = with_grads(attention, args, causal=True)
        ind.assert_same_bits(torch.ops.mixprec.attention(*args, True, 0.25)[0], want[0])
    ind.assert_same_bits(got[0], want[0])
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x.dtype == torch.float32
        ind.assert_same_bits(x, y.float())


def test_compiled() -> None:
    """Forward and backward in one graph, with bits as without; another length compiles anew."""
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for t, causal in ((9, True), (9, False), (13, True), (17, True)):
        args = operands(torch.bfloat16, t=t)
        want, got = (with_grads(f, args, causal=causal) for f in (attention, compiled))
        for x, y in zip(got, want, strict=True):
            ind.assert_same_bits(x, y)
            assert x.stride() == y.stride()
