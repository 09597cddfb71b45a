"""unscale_: divide gradients by the loss scale and detect Inf and NaN, in one pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .grad_kind import add_counts, kinds
from .launch import FORMATS, codes, is_dense, on, soft_cast
from .tiles import decode, encode, is_nonfinite, load, store

BLOCK = 4096


@triton.jit
def _block(grad_ptr, inv_scale, found_inf_ptr, counts_ptr, offsets, n, G: tl.constexpr,
           SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    raw = decode(load(grad_ptr, offsets, n, FULL), G, SOFT_CAST)
    y = raw * inv_scale.to(raw.dtype)
    rounded = encode(y, y, G, SOFT_CAST)
    store(grad_ptr, offsets, rounded, n, FULL)
    # Products with Inf and NaN are never finite, so this also detects them in the gradient.
    unscaled = decode(rounded, G, SOFT_CAST)
    if tl.max(is_nonfinite(unscaled).to(tl.int32), axis=0) != 0:
        tl.store(found_inf_ptr, 1.0)
    if counts_ptr is not None:
        add_counts(counts_ptr, kinds(raw, unscaled, offsets, n, G, FULL))


@triton.jit
def unscale_kernel(
    grad_ptr,
    inv_scale_ptr,
    found_inf_ptr,
    counts_ptr,  # int64 [4], initially 0; None: nothing is counted
    n,
    G: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inv_scale = tl.load(inv_scale_ptr)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(grad_ptr, inv_scale, found_inf_ptr, counts_ptr, offsets, n, G, SOFT_CAST, True)
    else:
        _block(grad_ptr, inv_scale, found_inf_ptr, counts_ptr, offsets, n, G, SOFT_CAST, False)


def unscale_(args: Any) -> None:
    grads, inv_scale, found_inf, counts = args
    if counts is not None:
        counts.zero_()
    with on(found_inf):
        for i, grad in enumerate(grads):
            if grad.numel() == 0:
                continue
            flat = grad if is_dense(grad) else grad.contiguous()
            unscale_kernel[(triton.cdiv(grad.numel(), BLOCK),)](
                codes(flat),
                inv_scale,
                found_inf,
                None if counts is None else counts[i],
                grad.numel(),
                G=FORMATS[grad.dtype],
                SOFT_CAST=soft_cast(grad.device, grad.dtype),
                BLOCK=BLOCK,
            )
            if flat is not grad:
                grad.copy_(flat)
