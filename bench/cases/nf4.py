"""quantize_nf4 and dequantize_nf4 against the same in torch, and against bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec.ops.nf4 import dequantize_nf4_reference, quantize_nf4_reference

from .. import device, verify
from .registry import GPU_DTYPES, Workload, case, times_faster

SHAPE = (1024, 4096)
TARGET = 1.5


def _bitsandbytes(w: torch.Tensor, decodes: bool) -> dict[str, Callable[[], Any]]:
    """Its kernel for the CPU, where it is installed."""
    try:
        from bitsandbytes import functional
    except ImportError:
        return {}
    quantize = partial(functional.quantize_4bit, w, blocksize=64, quant_type="nf4")
    if not decodes:
        return {"bitsandbytes": quantize}
    codes, state = quantize()
    return {"bitsandbytes": partial(functional.dequantize_4bit, codes, state)}


def _workload(dtype: torch.dtype, decodes: bool) -> Workload:
    w = device.randn(*SHAPE, dtype=dtype, seed=0, on="cpu")
    q = mixprec.ops.quantize_nf4(w, double_quant=False)
    ours: Callable[[], Any]
    if decodes:
        ours = partial(mixprec.ops.dequantize_nf4, q, SHAPE, dtype)
        plain = partial(dequantize_nf4_reference, *q, list(SHAPE), dtype)
        check = partial(verify.same_as_reference, lambda: [ours()])
    else:
        ours = partial(mixprec.ops.quantize_nf4, w, double_quant=False)
        plain = partial(quantize_nf4_reference, w)
        check = partial(verify.same_as_reference, lambda: ours()[:2])
    others = device.eager_and_compiled(plain, on_gpu=False)
    size = w.numel()
    moved = size * (dtype.itemsize + 0.5) + 4.0 * (size // 64)
    return Workload(ours, {**others, **_bitsandbytes(w, decodes)}, check, bytes=moved)


for _what in ("decode", "encode"):
    for _name, _dtype in GPU_DTYPES.items():
        case(
            f"nf4/{_what}/{_name}",
            f"{_what} a weight [{SHAPE[0]}, {SHAPE[1]}] of {_name}",
            times_faster(TARGET),
            partial(_workload, _dtype, _what == "decode"),
            quick=_name == "bf16",
        )
