"""act_quantize and act_backward: a kernel computes fp32 values, and quantize casts them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .activations import activation
from .launch import FORMATS, codes, on, soft_cast
from .quantize import quantize_values
from .tiles import decode, load, store

BLOCK = 1024


@triton.jit
def _values(x_ptr, up_ptr, y_ptr, offsets, n, X: tl.constexpr, KIND: tl.constexpr,
            SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    y, _ = activation(decode(load(x_ptr, offsets, n, FULL), X, SOFT_CAST), KIND)
    if up_ptr is not None:
        y = y * decode(load(up_ptr, offsets, n, FULL), X, SOFT_CAST)
    store(y_ptr, offsets, y, n, FULL)


@triton.jit
def act_quantize_kernel(
    x_ptr,
    up_ptr,  # None: no gate
    y_ptr,  # fp32
    n,
    X: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _values(x_ptr, up_ptr, y_ptr, offsets, n, X, KIND, SOFT_CAST, True)
    else:
        _values(x_ptr, up_ptr, y_ptr, offsets, n, X, KIND, SOFT_CAST, False)


@triton.jit
def _gradients(g_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, offsets, n, G: tl.constexpr, X: tl.constexpr,
               KIND: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    g = decode(load(g_ptr, offsets, n, FULL), G, SOFT_CAST)
    value, slope = activation(decode(load(x_ptr, offsets, n, FULL), X, SOFT_CAST), KIND)
    if up_ptr is not None:
        store(dup_ptr, offsets, g * value, n, FULL)
        g = g * decode(load(up_ptr, offsets, n, FULL), X, SOFT_CAST)
    store(dx_ptr, offsets, g * slope, n, FULL)


@triton.jit
def act_backward_kernel(
    g_ptr,
    x_ptr,
    up_ptr,  # None: no gate
    dx_ptr,  # fp32
    dup_ptr,  # fp32, if there is a gate
    n,
    G: tl.constexpr,
    X: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _gradients(g_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, offsets, n, G, X, KIND, SOFT_CAST, True)
    else:
        _gradients(g_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, offsets, n, G, X, KIND, SOFT_CAST, False)


def act_quantize(
    x: torch.Tensor,
    up: torch.Tensor | None,
    kind: str,
    cast: Any,
) -> tuple[torch.Tensor, ...]:
    x, gate = x.contiguous(), None if up is None else codes(up.contiguous())
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        with on(x):
            act_quantize_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                codes(x), gate, y, x.numel(), X=FORMATS[x.dtype], KIND=kind,
                SOFT_CAST=soft_cast(x.device, x.dtype), BLOCK=BLOCK, enable_fp_fusion=False,
            )  # fmt: skip
    return quantize_values(y, cast)


def act_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    kind: str,
    cast: Any,
) -> tuple[torch.Tensor, ...]:
    g, x, gate = g.contiguous(), x.contiguous(), None if up is None else codes(up.contiguous())
    dx = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dup = None if up is None else torch.empty_like(dx)
    if x.numel():
        with on(x):
            act_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                codes(g), codes(x), gate, dx, dup, x.numel(), G=FORMATS[g.dtype],
                X=FORMATS[x.dtype], KIND=kind, SOFT_CAST=soft_cast(x.device, g.dtype, x.dtype),
                BLOCK=BLOCK, enable_fp_fusion=False,
            )  # fmt: skip
    of_x = quantize_values(dx, cast)
    if dup is not None:
        return *of_x, *quantize_values(dup, cast._replace(scale=None))
    nothing = [x.new_empty(shape, dtype=cast.dtype) for shape in ((0,), (0, 0))]
    return *of_x, *nothing, *(dx.new_empty((0,)) for _ in range(3))
