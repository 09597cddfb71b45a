"""compress_saved: gradients are right on average, for every kind of op, with outliers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cases import for_each
from torch.nn import functional as F

import mixprec
from mixprec.functional import attention, mlp, norm_linear

ROWS, WIDTH = 32, 256
SDPA = F.scaled_dot_product_attention
W = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 16
UP, DOWN = W[:128], W[:64, :128]


def image(t: torch.Tensor) -> torch.Tensor:
    return t.view(4, 16, 8, 16)


def by_hand(x: torch.Tensor) -> torch.Tensor:
    q = x.view(2, 2, -1, 64)
    scores = q @ (q * 3 / q.detach().square().sum(-1, keepdim=True)).transpose(-1, -2)
    return scores.softmax(-1) @ q


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, W),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
    "relu_": lambda x: F.relu(x * 1, inplace=True),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, W[0, :1].abs()),
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.3),
    "selu": F.selu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "threshold": lambda x: F.threshold(x, 0.25, 0.5),
    "sigmoid": lambda x: torch.sigmoid(x - 4),
    "tanh": lambda x: torch.tanh(x * 2),
    "glu": F.glu,
    "dropout": lambda x: F.dropout(x, 0.1),
    "mul": lambda x: x * x.flip(0),
    "square": torch.square,
    "addcmul": lambda x: torch.addcmul(x, x * 2, x.flip(1)),
    "lerp": lambda x: torch.lerp(x * 1, x.flip(0), x * 0.1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "layer_norm, short rows": lambda x: F.layer_norm(x.view(-1, 32), (32,)),
    "rms_norm": lambda x: F.rms_norm(x.view(-1, 32), (32,)),
    "rms_norm by hand": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "group_norm": lambda x: F.group_norm(image(x), 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, image": lambda x: F.batch_norm(image(x), None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(image(x)),
    "max_pool2d": lambda x: F.max_pool2d(image(x), 2),
    "softmax": lambda x: F.softmax(x / x.detach().abs().amax() * 5, -1),
    "attention by hand": by_hand,
    "mlp": lambda x: mlp(x, UP, DOWN, recipe="bf16"),
    "gated mlp": lambda x: mlp(x, UP, DOWN, gate=W[128:], act="silu", recipe="bf16"),
    "relu2": lambda x: mlp(x, UP, DOWN, act="relu2", recipe="bf16"),
    "norm_linear": lambda x: norm_linear(x, UP, recipe="bf16")[0],
    # Ops that save each other's tensors, some of them twice.
    "linear, gelu, layer_norm": lambda x: F.layer_norm(F.gelu(F.linear(x, W)), (WIDTH,)),
    "linear, sigmoid, mul": lambda x: x * torch.sigmoid(F.linear(x, W)),
    "relu, batch_norm": lambda x: F.batch_norm(
        x.t().contiguous().t().relu(), None, None, training=True
    ),
    "einsum": lambda x: torch.einsum("nd,nd,ed->ne", x, x, W) * 0.05,
}


def errors(
    run: Callable[[], torch.Tensor], x: torch.Tensor, mode: str, seeds: int, draw: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact gradient of x for the gradient draw(run()), and the errors of `seeds` others."""
    y = run()
    g = draw(y)
    (exact,) = torch.autograd.grad(y, x, g)
    found = []
    for seed in range(seeds):
        with mixprec.compress_saved(mode, seed=seed):
            y = run()
        found.append(torch.autograd.grad(y, x, g)[0] - exact)
    return exact, torch.stack(found)


def assert_independent(error: torch.Tensor) -> None:
    """The mean of independent errors has their variance by their number; a bias adds to that."""
    assert error.any()
    assert error.mean(0).square().mean() < 1.5 / len(error) * error.square().mean()


@for_each("mode", ["int8", "int4"])
@for_each("name", list(KINDS))
def test_gradients_have_the_right_mean(mode: str, name: str) -> None:
    """A group of 128 is half a row. The outlier is in each group, or in one."""
    random = torch.Generator().manual_seed(0)

    def run() -> torch.Tensor:
        torch.manual_seed(2)
        return KINDS[name](x * 1)

    for outlier, groups in ((1, 0), (100, slice(None)), (1000, slice(None)), (1000, 3)):
        x = torch.randn(ROWS, WIDTH, generator=random)
        if outlier > 1:
            x.view(-1, 128)[groups, 7] = outlier
        exact, error = errors(run, x.requires_grad_(), mode, 30, torch.randn_like)
        along = float((error.mean(0) * exact).sum() / exact.square().sum())
        assert abs(along) < 0.02, f"{name} {outlier} {groups}: {along}"


def heads(largest: float, dtype: torch.dtype) -> torch.Tensor:
    """q, k and v [B, T, 3, H, D], views of one tensor, with scores up to about `largest`."""
    qkv = torch.randn(2, 128, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    qkv[:, :, :2] *= (largest / ((q @ k.transpose(-1, -2)).abs().max() / 8)) ** 0.5
    return qkv.to(dtype)


def mha(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = (t.transpose(1, 2).reshape(-1, 128).view(2, 128, 128) for t in (q, k, v))
    eye, zero = torch.eye(128, dtype=q.dtype).repeat(3, 1), torch.zeros(384, dtype=q.dtype)
    y, _ = F.multi_head_attention_forward(
        *(t.transpose(0, 1) for t in parts), 128, 2, eye, zero, None, None, False, 0.0,
        eye[:128], zero[:128], need_weights=False,
    )  # fmt: skip
    return y


@pytest.mark.parametrize("function", [SDPA, attention, mha], ids=["torch", "mixprec", "mha"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(function: Any, dtype: torch.dtype) -> None:
    """A fused backward takes exp(q k^T - logsumexp): errors of q k^T are no longer weights."""
    for largest, bound in ((400, 0.015), (1000, 0.04)):
        qkv, seeds = heads(largest, dtype).requires_grad_(), 100

        def run(qkv: torch.Tensor = qkv) -> torch.Tensor:
            return function(*(qkv * 1).permute(2, 0, 3, 1, 4))

        exact, error = errors(run, qkv, "int8", seeds, torch.randn_like)
        exact, error = exact[:, :, 0].double(), error[:, :, :, 0].double()
        assert error.square().sum((1, 2, 3, 4)).sqrt().mean() < bound * exact.norm()
        if dtype == torch.float32:
            assert_independent(error)
        along = (error * exact).sum((1, 2, 3, 4)) / exact.square().sum()
        # Of rounding to BF16: with AVX512-BF16, up to that of the gradients of scores, 2^-9.
        own = 0.0 if dtype == torch.float32 else 0.0025
        assert abs(float(along.mean())) < 3 * float(along.std()) / seeds**0.5 + own


SQUARES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "square": lambda x, w: (x * 1.5).square(),
    "x (x w)": lambda x, w: x * (x @ w),
    "x x x": lambda x, w: (x @ x.t()) @ x,
    "bilinear": lambda x, w: F.bilinear(x, x, w[None]),
}


@for_each("name", SQUARES)
def test_errors_are_not_multiplied_with_themselves(name: str) -> None:
    """One error in two factors of a gradient would bias it by its variance."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    x[:, 3] = 100
    x.requires_grad_()
    for leaf in (x,) if name in ("square", "x x x") else (x, w):
        _, error = errors(lambda: SQUARES[name](x * 1, w), leaf, "int4", 100, torch.ones_like)
        assert_independent(error)


def gradient(function: Any, x: torch.Tensor, bits: str | None) -> torch.Tensor:
    with nullcontext() if bits is None else mixprec.compress_saved(bits, seed=0):
        y = function(x * 1)
    return torch.autograd.grad(y.float().sum(), x)[0]


def test_units_far_below_zero_get_no_gradient_of_their_own() -> None:
    """A derivative that is 10^-4 there, or 0 in 4 bits, but not that of the limit."""
    for function, at in ((F.silu, -12.0), (F.mish, -12.0), (F.gelu, -6.0)):
        x = torch.full((64, 128), at).requires_grad_()
        exact = gradient(function, x, None)
        torch.testing.assert_close(gradient(function, x, "int8"), exact, rtol=0.02, atol=1e-7)
        assert gradient(function, x, "int4").abs().max() <= exact.abs().max() * 1.02


def large_scores(attend: Any) -> Any:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 64, 64)
    q.view(-1)[::128] = k.view(-1)[::128] = 1000
    return lambda x: attend(q * 1, k * 1, x.view(2, 4, 64, 64))


EXACT = [
    *((large_scores(attend), torch.randn(512, 64)) for attend in (SDPA, attention)),
    # Saturated results in 16 bits.
    *((f, (1000 * torch.randn(64, 128)).bfloat16()) for f in (torch.tanh, torch.sigmoid)),
    # Thresholds are compared as torch does.
    *(
        (partial(F.threshold, threshold=at, value=20.0), torch.full((64, 128), at, dtype=dtype))
        for at in (0.1, 0.3, 0.01, 0.7)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
]


@for_each("function, x", EXACT)
def test_what_codes_would_change_is_kept(function: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    assert torch.equal(gradient(function, x, "int8"), gradient(function, x, None))
