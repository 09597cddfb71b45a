"""dequantize: from a low-precision tensor and its scale back to fp32, bf16 or fp16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import FORMATS, codes, on, soft_cast
from .tiles import decode, encode, load, store

BLOCK = 4096


@triton.jit
def _block(q_ptr, scale_inv, out_ptr, offsets, n, Q: tl.constexpr, OUT: tl.constexpr,
           SOFT_CAST: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    y = decode(load(q_ptr, offsets, n, FULL), Q, SOFT_CAST) * scale_inv
    store(out_ptr, offsets, encode(y, y, OUT, SOFT_CAST), n, FULL)


@triton.jit
def dequantize_kernel(
    q_ptr,
    scale_inv_ptr,
    out_ptr,
    n,
    Q: tl.constexpr,
    OUT: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale_inv = tl.load(scale_inv_ptr)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _block(q_ptr, scale_inv, out_ptr, offsets, n, Q, OUT, SOFT_CAST, True)
    else:
        _block(q_ptr, scale_inv, out_ptr, offsets, n, Q, OUT, SOFT_CAST, False)


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data = data.contiguous()
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    if data.numel():
        with on(data):
            dequantize_kernel[(triton.cdiv(data.numel(), BLOCK),)](
                codes(data),
                scale_inv,
                codes(out),
                data.numel(),
                Q=FORMATS[data.dtype],
                OUT=FORMATS[dtype],
                SOFT_CAST=soft_cast(data.device, data.dtype),
                BLOCK=BLOCK,
            )
    return out
