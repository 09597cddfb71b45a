"""Whether a GPU multiplies block formats itself: compared with exact products before first use."""

from __future__ import annotations

import logging
import os

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..._context import context
from ...formats import E4M3
from .._reference import block_formats
from . import backends, library
from .scaled_mm import CAPABILITIES, MXFP8, NVFP4, Blocks, multiply, why_not

logger = logging.getLogger("mixprec")

_left_out: dict[int, str | None] = {}  # by GPU, once compared: why it is not used, or None


def reads_swizzled(fmt: str, device: torch.device) -> bool:
    """Whether products of this format on `device` read scales in the swizzled layout."""
    if device.type != "cuda" or (fmt not in MXFP8 and fmt != NVFP4):
        return False
    return _unavailable(library.capability(device.index or 0), device.index or 0) is None


def product(
    a: Blocks, b: Blocks, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor | None:
    """`multiply` on a GPU; None where torch has no such call, or not for this one."""
    index = a.data.device.index or 0
    capability = library.capability(index)
    if why_not(a, b, capability) or _unavailable(capability, index) or not _ready(index):
        return None
    if torch.compiler.is_compiling():
        return torch.ops.mixprec.gemm_blocks_vendor(*a[:4], *b[:4], bias, out_dtype)
    return multiply(a, b, bias, out_dtype)


def _unavailable(capability: library.Capability | None, index: int) -> str | None:
    if capability is None or capability[0] not in CAPABILITIES:
        return "compute capability 10 or 12"
    if context.backend not in (None, "vendor"):
        return "use_backend"
    return _why_left_out(index)


def _why_left_out(index: int) -> str | None:
    return backends.disabled("vendor", "gemm") or _left_out.get(index)


# Constant for the process: torch.compile need not trace into the environment.
_why_left_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _ready(index: int) -> bool:
    """Whether a product of small integers with it on GPU `index`, the first time, is exact."""
    if index not in _left_out:
        if not backends.can_compare():
            if backends.is_capturing():
                raise RuntimeError(
                    "gemm: a graph is being captured and torch's product of block formats has not "
                    "run yet; run a step before the capture, as torch.cuda.graph asks, so that it "
                    "is compared with the exact one"
                )
            return True
        with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
            _left_out[index] = reason = difference(f"cuda:{index}")
        if reason is not None and os.environ.get("MIXPREC_STRICT") == "1":
            raise RuntimeError(f"gemm: {reason}; please report it")
        if reason is not None:
            logger.error(
                "gemm: %s. Block formats are decoded to bfloat16 instead; please report it. "
                "(MIXPREC_STRICT=1 makes this an error.)",
                reason,
            )
    return _left_out[index] is None


# Constant for the process: torch.compile need not trace into the comparison.
_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def difference(device: str) -> str | None:
    """How products of example operands differ from the exact ones; None if they do not."""
    e4m3, e5m2 = MXFP8
    for a_fmt, b_fmt in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3), (NVFP4, NVFP4)):
        (a, wide_a), (b, wide_b) = example(a_fmt, 140, device), example(b_fmt, 48, device)
        try:
            y = multiply(a, b, None, torch.float32)
        except Exception as error:
            if "out of memory" in str(error):  # which says nothing about the product
                raise
            return f"torch's product of {a_fmt} and {b_fmt} fails ({error})"
        if not torch.equal(y.double(), wide_a @ wide_b.t()):
            return f"torch's product of {a_fmt} and {b_fmt} is not exact for small integers"
    return None


def example(fmt: str, rows: int, device: str) -> tuple[Blocks, torch.Tensor]:
    """Small integers times powers of two that differ by row and block, and their values in FP64."""
    block, k = block_formats.BLOCK_FORMATS[fmt], 192
    generator = torch.Generator("cpu").manual_seed(rows)
    x = torch.randint(-2, 3, (rows, k), generator=generator, dtype=torch.int32, device="cpu")
    exponent = torch.randint(
        -2, 3, (rows, k // block.block), generator=generator, dtype=torch.int32, device="cpu"
    )
    scale = exponent.float().exp2()
    codes = block_formats.encode(x.float(), block.element, None)
    wide = x.double() * scale.double().repeat_interleave(block.block, 1)
    tensor = None
    if block.nvfp4:
        codes, tensor = (
            block_formats.join(codes),
            torch.full((), 0.5, dtype=torch.float32, device=device),
        )
        stored = block_formats.encode(scale, E4M3, None).view(torch.float8_e4m3fn)
        wide = wide / 2
    else:
        stored = (exponent + 127).to(torch.uint8)
    data = codes.view(block.element.dtype).to(device)
    return Blocks(data, stored.to(device), tensor, fmt, k), wide.to(device)
