"""Shared by the launchers, on the host: how a tensor is passed, the device, and the casts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache

import torch
import triton

# Triton's interpreter runs the kernels in NumPy when this was set before triton was imported.
INTERPRETED = bool(triton.knobs.runtime.interpret)

FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
MAX = {dtype: torch.finfo(dtype).max for dtype in FORMATS}
_CODES = {1: torch.uint8, 2: torch.uint16}


def codes(x: torch.Tensor) -> torch.Tensor:
    """x as a kernel argument: 8- and 16-bit formats as unsigned integers, in the same memory."""
    return x.view(_CODES[x.element_size()]) if x.element_size() < 4 else x


def codes_in_order(x: torch.Tensor | None) -> torch.Tensor | None:
    """The same for what may be absent, and has to be contiguous."""
    return None if x is None else codes(x.contiguous())


def format_of(x: torch.Tensor | None) -> str | None:
    return None if x is None else FORMATS[x.dtype]


@cache
def _converts_fp8(device: torch.device) -> bool:
    """Whether the GPU can convert fp32 to fp8: NVIDIA's from compute capability 8.9 on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def soft_cast(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether a kernel that converts between these dtypes and fp32 has to do it in integers."""
    has_fp8 = any(dtype.itemsize == 1 for dtype in dtypes)
    return INTERPRETED or (has_fp8 and not _converts_fp8(device))


def is_dense(x: torch.Tensor) -> bool:
    """The elements fill one range of memory without gaps or overlaps, in some order."""
    if x.is_contiguous():
        return True
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def in_one_order(tensors: Sequence[torch.Tensor]) -> bool:
    """All tensors are dense, with their elements in the same order in memory."""
    if all(t.is_contiguous() for t in tensors):
        return True
    return is_dense(tensors[0]) and all(t.stride() == tensors[0].stride() for t in tensors)


def on(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes x's GPU the current one, which Triton launches on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
