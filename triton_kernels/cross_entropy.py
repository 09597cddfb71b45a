"""cross_entropy: a program per row. cross_entropy_backward: a program per block of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .activations import exp_fp32
from .launch import FORMATS, codes, on, soft_cast
from .tiles import ceil_div, encode, int64

BLOCK = 1024
COLUMNS = 4  # of the statistics of a row
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _exp(d):
    """e^d: 0 below -87, e^87 above 87; NaN stays."""
    e = exp_fp32(tl.where(d > 87.0, 87.0, d))
    return tl.where(d < -87.0, 0.0, e)


@triton.jit
def _tanh(x, scale):
    """tanh(x / softcap), scale being 2 / softcap."""
    v = x * scale
    u = v * 0.5
    q = u * u
    series = ((q * (-17.0 / 315.0) + 2.0 / 15.0) * q - 1.0 / 3.0) * q * u + u
    tanh = 1.0 - tl.div_rn(tl.zeros_like(x) + 2.0, _exp(v) + 1.0)
    return tl.where(q < 0.015625, series, tanh)


@triton.jit
def _load(logits_ptr, row, column, T, softcap, scale):
    """Logits, -inf beyond T, and tanh(logits / softcap), if there is a softcap."""
    x = tl.load(logits_ptr + (row * T + column), mask=column < T, other=float("-inf"))
    tanh = tl.zeros_like(x)
    if softcap != 0.0:
        tanh = _tanh(x, scale)
        x = tl.where(column < T, tanh * softcap, float("-inf"))
    return x, tanh


@triton.jit(do_not_specialize=["first"])
def cross_entropy_kernel(
    logits_ptr,  # [N, T]
    target_ptr,  # [N]
    rows_ptr,  # [N, 4]
    out_ptr,  # [N, 4]
    first,
    T,
    softcap,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes, before = tl.arange(0, BLOCK), rows_ptr + row * 4
    maximum, picked = tl.load(before), tl.load(before + 2)
    largest = tl.zeros((BLOCK,), tl.float32) + maximum
    for start in range(0, int64(T), BLOCK):
        x, _ = _load(logits_ptr, row, start + lanes, T, softcap, scale)
        largest = tl.where(x > largest, x, largest)  # not NaN, which the exponentials will hold
    most = tl.max(largest, axis=0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    own_column = tl.load(target_ptr + row) - first
    exponentials = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    own = tl.full((BLOCK,), -0.0, tl.float32)  # to which -0.0 can be added
    for start in range(0, int64(T), BLOCK):
        column = start + lanes
        x, _ = _load(logits_ptr, row, column, T, softcap, scale)
        exponentials += _exp(x - shift)
        sums += tl.where(column < T, x, 0.0)
        own += tl.where(column == own_column, x, -0.0)
    inside = (own_column >= 0) & (own_column < T)
    after = out_ptr + row * 4
    tl.store(after, most)
    total = tl.load(before + 1) * _exp(maximum - shift)
    tl.store(after + 1, total + tl.sum(exponentials, axis=0))
    tl.store(after + 2, tl.where(inside, tl.sum(own, axis=0), picked))
    tl.store(after + 3, tl.load(before + 3) + tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["first"])
def cross_entropy_backward_kernel(
    logits_ptr,  # [N, T]
    target_ptr,  # [N]
    logsumexp_ptr,  # [N]
    weight_ptr,  # [N]
    g_ptr,  # [N, T]
    first,
    T,
    smoothing,  # of each class
    own,  # 1 - label_smoothing
    z,  # 2 * z_loss
    softcap,
    scale,
    Q: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    across = ceil_div(T, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, tanh = _load(logits_ptr, row, column, T, softcap, scale)
    logsumexp, weight = tl.load(logsumexp_ptr + row), tl.load(weight_ptr + row)
    g = _exp(x - logsumexp) * (logsumexp * z + 1.0) - smoothing
    g = g - tl.where(column == tl.load(target_ptr + row) - first, own, 0.0)
    if softcap != 0.0:
        g = g * (1.0 - tanh * tanh)
    g = tl.where(weight == 0.0, 0.0, g * weight)
    tl.store(g_ptr + (row * T + column), encode(g, g, Q, SOFT_CAST), mask=column < T)


def _scale(softcap: float) -> float:
    return 2.0 / softcap if softcap != 0 else 0.0


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, first: int, softcap: float
) -> torch.Tensor:
    logits, target, rows = (t.contiguous() for t in (logits, target, rows))
    n, T = logits.shape
    out = torch.empty((n, COLUMNS), dtype=torch.float32, device=logits.device)
    if n:
        with on(logits):
            cross_entropy_kernel[(n,)](
                logits, target, rows, out, first, T, softcap, _scale(softcap), BLOCK=BLOCK,
                **OPTIONS,
            )  # fmt: skip
    return out


def cross_entropy_backward(args: Any) -> torch.Tensor:
    logits, target, logsumexp, weight = (t.contiguous() for t in args[:4])
    n, T = logits.shape
    g = torch.empty((n, T), dtype=args.out_dtype, device=logits.device)
    if g.numel():
        with on(logits):
            cross_entropy_backward_kernel[(n * triton.cdiv(T, BLOCK),)](
                logits, target, logsumexp, weight, codes(g), args.first, T,
                args.label_smoothing / args.classes, 1.0 - args.label_smoothing,
                2.0 * args.z_loss, args.softcap, _scale(args.softcap),
                Q=FORMATS[args.out_dtype], SOFT_CAST=soft_cast(g.device, args.out_dtype),
                BLOCK=BLOCK, **OPTIONS,
            )  # fmt: skip
    return g
