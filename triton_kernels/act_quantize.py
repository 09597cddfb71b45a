"""act_quantize and act_backward: a kernel computes fp32 values, and quantize casts them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .activations import activation
from .launch import codes_in_order, format_of, on, soft_cast
from .quantize import quantize_values
from .tiles import decode, load, store

BLOCK = 1024


@triton.jit
def _block(g_ptr, x_ptr, up_ptr, y_ptr, dup_ptr, offsets, n, G: tl.constexpr, X: tl.constexpr,
           KIND: tl.constexpr, SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    y, slope = activation(decode(load(x_ptr, offsets, n, FULL), X, SOFT_CAST), KIND)
    if g_ptr is not None:
        g = decode(load(g_ptr, offsets, n, FULL), G, SOFT_CAST)
        if up_ptr is not None:
            store(dup_ptr, offsets, g * y, n, FULL)
        y = g
    if up_ptr is not None:
        y = y * decode(load(up_ptr, offsets, n, FULL), X, SOFT_CAST)
    if g_ptr is not None:
        y = y * slope
    store(y_ptr, offsets, y, n, FULL)


@triton.jit
def activation_kernel(
    g_ptr,  # None: the forward pass
    x_ptr,
    up_ptr,  # None: no gate
    y_ptr,  # fp32; in the backward pass dx
    dup_ptr,  # fp32, in the backward pass of a gate
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
        _block(g_ptr, x_ptr, up_ptr, y_ptr, dup_ptr, offsets, n, G, X, KIND, SOFT_CAST, True)
    else:
        _block(g_ptr, x_ptr, up_ptr, y_ptr, dup_ptr, offsets, n, G, X, KIND, SOFT_CAST, False)


def _launch(
    g: torch.Tensor | None, x: torch.Tensor, up: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The activation, or with g the gradients of x and, if there is a gate, of up."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dup = None if g is None or up is None else torch.empty_like(y)
    if x.numel():
        dtypes = [t.dtype for t in (g, x) if t is not None]
        with on(x):
            activation_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                *map(codes_in_order, (g, x, up)), y, dup, x.numel(), G=format_of(g),
                X=format_of(x), KIND=kind, SOFT_CAST=soft_cast(x.device, *dtypes), BLOCK=BLOCK,
                enable_fp_fusion=False,
            )  # fmt: skip
    return y, dup


def act_quantize(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    return quantize_values(_launch(None, x, up, kind)[0], cast)


def act_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    dx, dup = _launch(g, x, up, kind)
    of_x = quantize_values(dx, cast)
    if dup is not None:
        return *of_x, *quantize_values(dup, cast._replace(scale=None))
    nothing = [x.new_empty(shape, dtype=cast.dtype) for shape in ((0,), (0, 0))]
    return *of_x, *nothing, *(dx.new_empty((0,)) for _ in range(3))
