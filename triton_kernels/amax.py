"""amax: the largest magnitude in a tensor, or of values that are computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import is_dense, on, soft_cast
from .source import Source, source_of, values
from .tiles import magnitude_bits

BLOCK = 4096  # elements per program: each of its 128 threads has 4 to 8 16-byte loads in flight


@triton.jit
def amax_kernel(
    source,
    amax_ptrs,  # of each result int32 bits, initially 0; a maximum does not depend on order
    given_ptr,  # a scale; unless it is 0, amax is not needed and not computed. None: it is needed
    n,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if given_ptr is not None:  # noqa: SIM102  (Triton's `and` loads from None, too)
        if tl.load(given_ptr) != 0.0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    full = start + BLOCK <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            ys = values(source, None, offsets, None, n, FULL, SOFT_CAST)
            for i in tl.static_range(source.blocks):
                tl.atomic_max(amax_ptrs[i], tl.max(magnitude_bits(ys[i]), axis=0), sem="relaxed")


def amax_into(source: Source, *amax: torch.Tensor, given: torch.Tensor | None = None) -> None:
    """amax [] fp32 of each result, which holds 0, <- max |value|; x not empty, on the current GPU.
    If a scale other than 0 is given, does nothing."""
    n = source.x.numel()
    amax_kernel[(triton.cdiv(n, BLOCK),)](
        source,
        tuple(bits.view(torch.int32) for bits in amax),
        given,
        n,
        SOFT_CAST=soft_cast(source.x.device, source.x.dtype),
        BLOCK=BLOCK,
        num_warps=source.warps(4),
        enable_fp_fusion=False,
    )


def amax(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel():
        with on(x):
            # The order of the elements does not matter: those of a dense x as they are in memory.
            flat = x.as_strided((x.numel(),), (1,)) if is_dense(x) else x
            amax_into(source_of(flat), result)
    return result
