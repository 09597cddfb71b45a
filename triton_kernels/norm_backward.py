"""norm_backward: a program per row computes the gradient of x, and others the sums of columns.
Sums are in the order that csrc/math/norm.h fixes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, codes_in_order, format_of, on, soft_cast
from .norm_quantize import LANES, row_sum
from .tiles import ceil_div, decode, encode, int64

BAND = 64  # rows of a partial sum of a column
COLUMNS = 128
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _gw_and_xhat(g_ptr, x_ptr, weight_ptr, mean, rstd, first, column, K, G: tl.constexpr,
                 X: tl.constexpr, W: tl.constexpr, SOFT_CAST: tl.constexpr):  # fmt: skip
    inside = column < K
    gw = decode(tl.load(g_ptr + (first + column), mask=inside, other=0), G, SOFT_CAST)
    if weight_ptr is not None:
        gw = gw * decode(tl.load(weight_ptr + column, mask=inside, other=0), W, SOFT_CAST)
    x = decode(tl.load(x_ptr + (first + column), mask=inside, other=0), X, SOFT_CAST)
    return gw, (x - mean) * rstd


@triton.jit
def norm_backward_kernel(
    g_ptr,  # [M, K]
    x_ptr,  # [M, K]
    weight_ptr,  # [K] or None
    mean_ptr,  # [M], or None for RMSNorm
    rstd_ptr,  # [M]
    g_total_ptr,  # [M, K] or None
    dx_ptr,  # [M, K]
    K,
    G: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first, lanes, k = row * K, tl.arange(0, LANES), int64(K).to(tl.float32)
    mean = tl.zeros((), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, int64(K), LANES):
        column = start + lanes
        gw, xhat = _gw_and_xhat(g_ptr, x_ptr, weight_ptr, mean, rstd, first, column, K, G, X, W,
                                SOFT_CAST)  # fmt: skip
        products += tl.where(column < K, gw * xhat, 0.0)
        total += gw
    c1 = tl.div_rn(row_sum(products), k)
    c2 = tl.zeros((), tl.float32)
    if mean_ptr is not None:
        c2 = tl.div_rn(row_sum(total), k)
    for start in range(0, int64(K), LANES):
        column = start + lanes
        gw, xhat = _gw_and_xhat(g_ptr, x_ptr, weight_ptr, mean, rstd, first, column, K, G, X, W,
                                SOFT_CAST)  # fmt: skip
        dx = ((gw - c2) - xhat * c1) * rstd
        if g_total_ptr is not None:
            more = tl.load(g_total_ptr + (first + column), mask=column < K, other=0)
            dx = dx + decode(more, T, SOFT_CAST)
        tl.store(dx_ptr + (first + column), encode(dx, dx, X, SOFT_CAST), mask=column < K)


@triton.jit
def norm_bands_kernel(
    g_ptr,  # [M, K]
    x_ptr,  # [M, K]
    mean_ptr,  # [M], or None for RMSNorm
    rstd_ptr,  # [M]
    bands_ptr,  # [2, bands, K]: of dweight, of dbias
    M,
    K,
    G: tl.constexpr,
    X: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BAND: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = ceil_div(K, COLUMNS)
    band = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    for i in range(min(BAND, M - band * BAND)):
        row = band * BAND + i
        g = decode(tl.load(g_ptr + (row * K + column), mask=inside, other=0), G, SOFT_CAST)
        x = decode(tl.load(x_ptr + (row * K + column), mask=inside, other=0), X, SOFT_CAST)
        if mean_ptr is not None:
            x = x - tl.load(mean_ptr + row)
        dweight += g * (x * tl.load(rstd_ptr + row))
        dbias += g
    tl.store(bands_ptr + (band * K + column), dweight, mask=inside)
    tl.store(bands_ptr + ((ceil_div(M, BAND) + band) * K + column), dbias, mask=inside)


@triton.jit(do_not_specialize=["bands"])
def norm_columns_kernel(
    bands_ptr,  # [2, bands, K]
    sums_ptr,  # [2, K]
    bands,
    K,
    COLUMNS: tl.constexpr,
):
    across = ceil_div(K, COLUMNS)
    which = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for band in range(bands):
        total += tl.load(bands_ptr + ((which * bands + band) * K + column), mask=column < K)
    tl.store(sums_ptr + (which * K + column), total, mask=column < K)


def norm_backward(args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g, x, weight, mean, rstd, g_total, with_bias = args
    g, x = g.contiguous(), x.contiguous()
    M, K = x.shape[:-1].numel(), x.shape[-1]
    means = mean.contiguous() if mean.numel() else None
    rstd = rstd.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bands, across = triton.cdiv(M, BAND), triton.cdiv(K, COLUMNS)
    of_bands = torch.empty((2, bands, K), dtype=torch.float32, device=x.device)
    sums = torch.zeros((2, K), dtype=torch.float32, device=x.device)
    soft = soft_cast(x.device, x.dtype)
    formats = {"G": FORMATS[g.dtype], "X": FORMATS[x.dtype], "SOFT_CAST": soft}
    if x.numel():
        with on(x):
            norm_backward_kernel[(M,)](
                codes(g), codes(x), codes_in_order(weight), means, rstd, codes_in_order(g_total),
                codes(dx), K, W=format_of(weight), T=format_of(g_total), LANES=LANES, num_warps=1,
                **formats, **OPTIONS,
            )  # fmt: skip
            if weight is not None or with_bias:
                norm_bands_kernel[(bands * across,)](
                    codes(g), codes(x), means, rstd, of_bands, M, K, BAND=BAND, COLUMNS=COLUMNS,
                    **formats, **OPTIONS,
                )  # fmt: skip
                norm_columns_kernel[(2 * across,)](
                    of_bands, sums, bands, K, COLUMNS=COLUMNS, **OPTIONS
                )
    nothing = sums.new_empty((0,))
    return (
        dx,
        nothing if weight is None else sums[0],
        sums[1] if with_bias else nothing.clone(),
    )
