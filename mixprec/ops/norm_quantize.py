"""norm_quantize: a residual sum, LayerNorm or RMSNorm, and the cast, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import Format
from ..quantized import Quantized
from ._dispatch import casts, checks
from ._dispatch.casts import Cast
from ._dispatch.op import Op
from ._reference import scale_layout
from .quantize import quantize_reference

LANES = 256  # partial sums of a row
BAND = 64  # rows summed one after the other for dweight and dbias

# data, data_t, scale_inv, scale_inv_t, amax; total, mean, rstd
Result = tuple[torch.Tensor, ...]


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums of the rows of x, fp32 [M, K] -> [M, 1], in the order of csrc/math/norm.h."""
    m, k = x.shape
    padded = torch.nn.functional.pad(x, (0, -k % LANES)).view(m, -(-k // LANES), LANES)
    partial = x.new_zeros((m, LANES))
    for i in range(padded.shape[1]):
        partial = partial + padded[:, i]
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    return partial


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums of the columns of x, fp32 [M, K] -> [K]: bands of rows, then their sums."""
    m, k = x.shape
    bands = torch.nn.functional.pad(x, (0, 0, 0, -m % BAND)).view(-(-m // BAND), BAND, k)
    sums = x.new_zeros((bands.shape[0], k))
    for i in range(BAND):
        sums = sums + bands[:, i]
    total = x.new_zeros(k)
    for band in sums:
        total = total + band
    return total


def _divided(sums: torch.Tensor, k: int) -> torch.Tensor:
    return sums / torch.full_like(sums, k)  # a number would be a multiplication on a GPU


def norm_quantize_reference(args: Any) -> Result:
    """The results of the cast, then total (empty without residual), mean [M] (empty without
    subtract_mean) and rstd [M]. Results not requested are empty."""
    x, residual, weight, bias, eps, subtract_mean, *cast = args
    m, k = scale_layout.as_matrix(x.shape)
    if residual is None:
        total, rows = x.new_empty((0,)), x.reshape(m, k).float()
    else:
        total = x.new_empty(x.shape).copy_((x.float() + residual.float()).to(x.dtype))
        rows = total.view(m, k).float()
    mean = x.new_empty((0, 1), dtype=torch.float32)
    if subtract_mean:
        mean = _divided(_row_sums(rows), k)
        rows = rows - mean
    variance = _divided(_row_sums(rows * rows), k) + eps
    # torch's sqrt of FP32 tensors is not correctly rounded everywhere. An overflow is NaN, not 0.
    rstd = 1.0 / variance.double().sqrt().float() + 0.0 * variance
    y = rows * rstd
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return *quantize_reference(y.view(x.shape), Cast(*cast)), total, mean.view(-1), rstd.view(-1)


def norm_backward_reference(args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx in x's dtype, dweight and dbias fp32 [K] (empty without weight or with_bias):

        xhat    = (x - mean) * rstd;  gw = g * weight
        dx      = ((gw - sum(gw) / K) - xhat * (sum(gw * xhat) / K)) * rstd + g_total
        dweight = column sums of g * xhat;  dbias = column sums of g

    in FP32, in this order; dx is rounded once. x: what was normalized (total, with a residual); an
    empty mean: RMSNorm, without the first sum. g: the gradient of y, fp32, bf16 or fp16; g_total:
    that which reached total on another way, or None.
    """
    g, x, weight, mean, rstd, g_total, with_bias = args
    m, k = scale_layout.as_matrix(x.shape)
    g_rows, scale = g.reshape(m, k).float(), rstd.view(m, 1)
    layer_norm = mean.numel() > 0
    centred = x.reshape(m, k).float()
    if layer_norm:
        centred = centred - mean.view(m, 1)
    xhat = centred * scale
    gw = g_rows if weight is None else g_rows * weight.float()
    c1 = _divided(_row_sums(gw * xhat), k)
    dx = gw
    if layer_norm:
        dx = dx - _divided(_row_sums(gw), k)
    dx = (dx - xhat * c1) * scale
    if g_total is not None:
        dx = dx + g_total.reshape(m, k).float()
    nothing = dx.new_empty((0,))
    return (
        x.new_empty(x.shape).copy_(dx.view(x.shape).to(x.dtype)),
        nothing if weight is None else _column_sums(g_rows * xhat),
        _column_sums(g_rows) if with_bias else nothing.clone(),
    )


def _check_x(op: str, x: torch.Tensor, **vectors: torch.Tensor | None) -> None:
    checks.has_dtype(op, "x", x, checks.FLOATS)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have 1 or more dimensions, got shape ()")
    for name, t in vectors.items():
        checks.matches(op, name, t, checks.FLOATS, x, x.shape[-1:], "[K], x's last dimension,")


def _check(args: Any) -> None:
    op, (x, residual, weight, bias, _, _, *cast) = "norm_quantize", args
    _check_x(op, x, weight=weight, bias=bias)
    checks.is_like(op, "residual", residual, x, (x.dtype,))
    casts.check_fused(op, x, Cast(*cast))


def _check_backward(args: Any) -> None:
    op, x = "norm_backward", args.x
    _check_x(op, x, weight=args.weight)
    checks.is_like(op, "g", args.g, x, checks.FLOATS)
    checks.is_like(op, "g_total", args.g_total, x, checks.FLOATS)
    m, fp32 = scale_layout.as_matrix(x.shape)[:1], (torch.float32,)
    checks.matches(op, "rstd", args.rstd, fp32, x, m, "[M], x's rows,")
    checks.matches(op, "mean", args.mean, fp32, x)
    if tuple(args.mean.shape) != (0,):  # no mean: RMSNorm
        checks.has_shape(op, "mean", args.mean, m, "[M], x's rows,")


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, subtract_mean: bool, cast: Cast
) -> Result:
    rows, _ = scale_layout.as_matrix(x.shape)
    total = x.new_empty((0,) if residual is None else x.shape)
    mean, rstd = (
        x.new_empty((n,), dtype=torch.float32) for n in (rows if subtract_mean else 0, rows)
    )
    return *casts.fake(x, cast), total, mean, rstd


def _fake_backward(
    x: torch.Tensor, weight: torch.Tensor | None, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dweight, dbias = (
        x.new_empty((x.shape[-1] if asked else 0,), dtype=torch.float32)
        for asked in (weight is not None, with_bias)
    )
    return x.new_empty(x.shape), dweight, dbias


norm_quantize_op = Op(
    "norm_quantize",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool subtract_mean, "
    f"{casts.SCHEMA}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=norm_quantize_reference,
    fake=_fake,
    check=_check,
    triton="norm_quantize",
)

norm_backward_op = Op(
    "norm_backward",
    "(Tensor g, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? g_total, "
    "bool with_bias) -> (Tensor, Tensor, Tensor)",
    reference=norm_backward_reference,
    fake=_fake_backward,
    check=_check_backward,
    triton="norm_backward",
)


def norm_quantize(
    x: torch.Tensor,
    fmt: Format | str | torch.dtype,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    subtract_mean: bool = False,
    residual: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    transpose: bool = False,
    granularity: str = "tensor",
    power_of_two_scale: bool = True,
) -> tuple[Quantized, torch.Tensor]:
    """Return (`quantize(y, fmt, ...)`, total), y being the norm of the rows of total, in one pass:

        total = x + residual                           rounded to x's dtype; x without residual
        mean  = sum(total) / K                         with subtract_mean (LayerNorm), else 0
        rstd  = 1 / sqrt(sum((total - mean)^2) / K + eps)
        y     = (total - mean) * rstd * weight + bias

    x: [..., K], fp32, bf16 or fp16, any strides. residual: x's shape and dtype. weight, bias: [K],
    fp32, bf16 or fp16, or None. All of it is FP32 arithmetic, in an order of operations and sums
    that gives the same bits on every backend. y stays in FP32 and is then cast as `quantize` casts
    an FP32 tensor; the other arguments and the result are those of `quantize`. amax is that of y.
    Of the block formats there is "mx" of E4M3 and E5M2, with the default scale_mode. TypeError or
    ValueError names an invalid argument.

    Sources: LayerNorm (Ba et al., 2016); RMSNorm (Zhang, Sennrich, 2019).
    """
    op = "norm_quantize"
    parsed, cast = casts.fused(op, x, fmt, scale, transpose, granularity, power_of_two_scale)
    tensors = (x, residual, weight, bias)
    checks.needs_no_grad(op, "detach its inputs, or call it under torch.no_grad()", *tensors)
    results = norm_quantize_op(*tensors, float(eps), subtract_mean, *cast)
    total = x if residual is None else results[5]
    return casts.quantized(results, parsed, transpose, granularity), total
