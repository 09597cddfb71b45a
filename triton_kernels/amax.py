"""amax: the largest magnitude in a tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, is_dense, on, soft_cast
from .tiles import decode, load, magnitude_bits

BLOCK = 4096  # elements per program: each of its 128 threads has 4 to 8 16-byte loads in flight


@triton.jit
def _block(x_ptr, amax_ptr, offsets, n, FORMAT: tl.constexpr, SOFT_CAST: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    x = decode(load(x_ptr, offsets, n, FULL), FORMAT, SOFT_CAST)
    tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x), axis=0), sem="relaxed")


@triton.jit
def amax_kernel(
    x_ptr,
    amax_ptr,  # int32, the bits of the result, initially 0; a maximum does not depend on order
    given_ptr,  # a scale; unless it is 0, amax is not needed and not computed. None: it is needed
    n,
    FORMAT: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if given_ptr is not None:  # noqa: SIM102  (Triton's `and` loads from None, too)
        if tl.load(given_ptr) != 0.0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(x_ptr, amax_ptr, offsets, n, FORMAT, SOFT_CAST, True)
    else:
        _block(x_ptr, amax_ptr, offsets, n, FORMAT, SOFT_CAST, False)


def amax_into(x: torch.Tensor, result: torch.Tensor, given: torch.Tensor | None = None) -> None:
    """result [] fp32, which holds 0, <- max |x|; x dense, not empty, on the current GPU. If a
    scale other than 0 is given, does nothing."""
    amax_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        codes(x),
        result.view(torch.int32),
        given,
        x.numel(),
        FORMAT=FORMATS[x.dtype],
        SOFT_CAST=soft_cast(x.device, x.dtype),
        BLOCK=BLOCK,
    )


def amax(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel():
        with on(x):
            amax_into(x if is_dense(x) else x.contiguous(), result)
    return result
