"""act_quantize: an activation, the product with a gate's other half, and the cast, in one pass."""

from __future__ import annotations

from functools import partial

import torch

from ..formats import Format
from ..quantized import Quantized
from ._dispatch import casts, checks
from ._dispatch.casts import Cast
from ._dispatch.op import Op
from ._reference.rounding import exp_fp32
from .quantize import quantize_reference

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")

# Phi(-t) = e^(-t^2 / 2) * s * q(s - 3/4), s = 1 / (1 + 11/32 t): the polynomial q, from the
# highest power down.
_POWERS = (
    "-0x1.c7a1p-6 -0x1.78f1e8p-6 0x1.74b632p-5 0x1.55c97ap-7 -0x1.b9c226p-4 -0x1.e5815p-12 "
    "0x1.53a90ep-2 0x1.0092acp-1 0x1.6ae756p-2"
)
_PHI = [float.fromhex(x) for x in _POWERS.split()]

Pair = tuple[torch.Tensor, torch.Tensor]


def _gated(x: torch.Tensor, w: torch.Tensor, w_slope: torch.Tensor) -> Pair:
    """x / (1 + e^-w) and its derivative."""
    below = 1.0 + exp_fp32(-w)
    value, s = x / below, 1.0 / below
    return value, s + (value * (1.0 - s)) * w_slope


def _gelu_tanh(x: torch.Tensor) -> Pair:
    t = torch.where(x > 16.0, 16.0, x)
    t = torch.where(t < -16.0, -16.0, t)
    square = t * t
    w = t * (1.59576912 + 0.0713548163 * square)
    return _gated(x, w, 1.59576912 + 0.214064449 * square)


def _gelu(x: torch.Tensor) -> Pair:
    t = x.abs()
    t = torch.where(t > 15.0, 15.0, t)
    high = ((t.view(torch.int32) + 0x800) & ~0xFFF).view(torch.float32)  # 12 bits
    d = ((t - high) * (t + high)) * -0.5
    e = exp_fp32((high * high) * -0.5)
    e = e + e * (d + (d * d) * (d * 0.166666667 + 0.5))
    s = 1.0 / (1.0 + t * 0.34375)
    v = s - 0.75
    q = torch.full_like(v, _PHI[0])
    for coefficient in _PHI[1:]:
        q = q * v + coefficient
    tail = e * (s * q)
    phi = torch.where(x < 0.0, tail, 1.0 - tail)
    return x * phi, phi + (x * e) * 0.398942280


def _activation(x: torch.Tensor, kind: str) -> Pair:
    """The activation of an FP32 tensor and its derivative, as in csrc/math/activation.h."""
    if kind == "silu":
        return _gated(x, x, torch.ones_like(x))
    if kind == "gelu":
        return _gelu(x)
    if kind == "gelu_tanh":
        return _gelu_tanh(x)
    r = torch.where(x < 0.0, 0.0, x)
    return r * r, r + r


def act_quantize_reference(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Cast
) -> casts.Results:
    """Results not requested are empty."""
    y, _ = _activation(x.float(), kind)
    if up is not None:
        y = y * up.float()
    return quantize_reference(y, cast)


def act_backward_reference(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Cast
) -> tuple[torch.Tensor, ...]:
    """The results of a cast of dx, then of dup (empty without up):

        dx  = (g * up) * act'(x)        without up: g * act'(x)
        dup = g * act(x)

    in FP32, in this order. g: the gradient of y, x's shape, fp32, bf16 or fp16. scale and record
    are dx's; dup takes its own scale.
    """
    value, slope = _activation(x.float(), kind)
    g = g.float()
    if up is None:
        return *quantize_reference(g * slope, cast), *_no_cast(x, cast.dtype)
    dx = quantize_reference((g * up.float()) * slope, cast)
    return *dx, *quantize_reference(g * value, cast._replace(scale=None, record=None))


def _no_cast(x: torch.Tensor, dtype: torch.dtype) -> casts.Results:
    """The results of dup where there is no up."""
    data = (x.new_empty(shape, dtype=dtype) for shape in ((0,), (0, 0)))
    numbers = (x.new_empty((0,), dtype=torch.float32) for _ in range(3))
    return (*data, *numbers)  # type: ignore[return-value]


def _check(op: str, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Cast) -> None:
    checks.has_dtype(op, "x", x, checks.FLOATS)
    if kind not in KINDS:
        names = ", ".join(f'"{name}"' for name in KINDS)
        raise ValueError(f"{op}: kind must be one of {names}, got {kind!r}")
    checks.is_like(op, "up", up, x, (x.dtype,))
    casts.check_fused(op, x, cast)


def _check_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Cast
) -> None:
    _check("act_backward", x, up, kind, cast)
    checks.is_like("act_backward", "g", g, x, checks.FLOATS)


def _fake_backward(
    x: torch.Tensor, up: torch.Tensor | None, cast: Cast
) -> tuple[torch.Tensor, ...]:
    dup = _no_cast(x, cast.dtype) if up is None else casts.fake(x, cast._replace(record=None))
    return *casts.fake(x, cast), *dup


act_quantize_op = Op(
    "act_quantize",
    f"(Tensor x, Tensor? up, str kind, {casts.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=act_quantize_reference,
    fake=casts.fake,
    check=partial(_check, "act_quantize"),
    triton="quantize",
)

act_backward_op = Op(
    "act_backward",
    f"(Tensor g, Tensor x, Tensor? up, str kind, {casts.SCHEMA}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=act_backward_reference,
    fake=_fake_backward,
    check=_check_backward,
    triton="quantize",
)


def act_quantize(
    x: torch.Tensor,
    fmt: Format | str | torch.dtype,
    up: torch.Tensor | None = None,
    *,
    kind: str = "silu",
    scale: float | torch.Tensor | None = None,
    transpose: bool = False,
    granularity: str = "tensor",
    power_of_two_scale: bool = True,
) -> Quantized:
    """Return `quantize(act(x) * up, fmt, ...)`, or of act(x) without `up`, in one pass.

        "silu"       x / (1 + e^-x)
        "gelu"       x * Phi(x), Phi the distribution function of the normal distribution
        "gelu_tanh"  x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 * x^3)
        "relu2"      max(x, 0)^2

    x: any shape and strides, fp32, bf16 or fp16. up: x's shape and dtype. y = act(x) * up is
    computed in FP32, in an order of operations that gives the same bits on every backend ("gelu" is
    within 7 units in the last place where it is above 1e-15, "silu" within 3), and then cast as
    `quantize` casts an FP32 tensor; the other arguments and the result are those of `quantize`.
    amax is that of y. Of the block formats there is "mx" of E4M3 and E5M2, with the default
    scale_mode. TypeError or ValueError names an invalid argument.

    Sources: GELU and SiLU (Hendrycks, Gimpel, 2016); GLU variants (Shazeer, 2020); Primer for the
    squared ReLU (So et al., 2021).
    """
    op = "act_quantize"
    parsed, cast = casts.fused(op, x, fmt, scale, transpose, granularity, power_of_two_scale)
    checks.needs_no_grad(op, "detach x and up, or call it under torch.no_grad()", x, up)
    return casts.quantized(act_quantize_op(x, up, kind, *cast), parsed, transpose, granularity)
