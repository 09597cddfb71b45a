"""torch.nn.functional.scaled_mm, where tensor cores apply the scales of blocks themselves: on
Blackwell those of block formats, on Hopper FP32 scales of 128.

The product of block formats is compared with exact ones before its first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ..._context import context
from ...formats import E4M3
from .._reference import block_formats, scale_layout
from .._reference.scale_layout import BLOCK
from . import autocast, backends, library, self_check
from .library import Capability

MXFP8, NVFP4 = ("mxfp8_e4m3", "mxfp8_e5m2"), "nvfp4"
CAPABILITIES = (10, 12)
_left_out: dict[int, str | None] = {}  # by GPU, once compared: why it is not used, or None


class Blocks(NamedTuple):
    """A matrix [R, columns] in blocks along its rows, as `quantize_mx` returns it: scale_inv in
    rows or swizzled."""

    data: torch.Tensor
    scale_inv: torch.Tensor
    tensor_scale_inv: torch.Tensor | None
    fmt: str
    columns: int


def why_not(a: Blocks, b: Blocks, capability: Capability | None) -> str | None:
    """Why torch has no single call for a @ b^T; None if it has."""
    who = "torch.nn.functional.scaled_mm"
    if capability is None or capability[0] not in CAPABILITIES:
        return f"{who} takes block formats on compute capability 10 and 12 only"
    formats = a.fmt, b.fmt
    if not (formats == (NVFP4, NVFP4) or (a.fmt in MXFP8 and b.fmt in MXFP8)):
        return f"{who} multiplies MXFP8 by MXFP8 and NVFP4 by NVFP4, got {a.fmt} by {b.fmt}"
    if formats == ("mxfp8_e5m2", "mxfp8_e5m2"):
        return f"{who} does not multiply float8_e5m2 by float8_e5m2"
    m, n, k = a.data.shape[0], b.data.shape[0], a.columns
    if m == 0 or n == 0 or k == 0 or n % 16 or k % 32 or b.columns != k:
        return (
            f"{who} needs K that is a multiple of 32 and N of 16, got K = {k} of a and "
            f"{b.columns} of b, N = {n}"
        )
    for name, x in (("a", a), ("b", b)):
        blocks = block_formats.sizes(x.fmt, k)[1]
        shape = tuple(x.scale_inv.shape)
        rows = x.data.shape[0]
        if shape not in ((rows, blocks), scale_layout.swizzled_shape(rows, blocks)):
            return f"{who} needs a scale for each block of {name}, got shape {shape}"
        if not (x.data.is_contiguous() and (len(shape) == 2 or x.scale_inv.is_contiguous())):
            return f"{who} needs contiguous codes and scales of {name}"
        if (x.tensor_scale_inv is None) == (x.fmt == NVFP4):
            return f"{who} needs the FP32 scale of the tensor with NVFP4, and with it only"
        if x.tensor_scale_inv is not None and x.tensor_scale_inv.dim() > 0:
            return f"{who} needs one FP32 scale of {name}, got {tuple(x.tensor_scale_inv.shape)}"
    return None


def multiply(
    a: Blocks, b: Blocks, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """a @ b^T + bias of what `why_not` accepts, accumulated in FP32 and rounded once.

    The FP32 scales of two NVFP4 tensors are multiplied with each other, and then the sum with them.
    A bias that torch does not take is added in FP32.
    """
    fused = bias is not None and bias.dtype == out_dtype != torch.float32 and bias.is_contiguous()
    recipe = [functional.ScalingType.BlockWise1x32]
    swizzle = [functional.SwizzleType.SWIZZLE_32_4_4]
    if a.fmt == NVFP4:
        recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
        swizzle = [*swizzle, functional.SwizzleType.NO_SWIZZLE]
    with autocast.disabled("cuda"):
        y = functional.scaled_mm(
            _elements(a),
            _elements(b).t(),
            _scales(a),
            recipe,
            _scales(b),
            recipe,
            swizzle,
            swizzle,
            bias=bias if fused else None,
            output_dtype=out_dtype if fused or bias is None else torch.float32,
        )
        return y if fused or bias is None else y.add_(bias).to(out_dtype)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if x is a view not aligned to 16 bytes: rare, and invisible to a tracer."""
    if x.storage_offset() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _elements(x: Blocks) -> torch.Tensor:
    data = aligned(x.data)
    return data.view(torch.float4_e2m1fn_x2) if x.fmt == NVFP4 else data


def _scales(x: Blocks) -> list[torch.Tensor]:
    scales = x.scale_inv if x.scale_inv.dim() == 4 else scale_layout.swizzle(x.scale_inv)
    if x.tensor_scale_inv is not None:
        return [scales, x.tensor_scale_inv]
    return [scales.view(torch.float8_e8m0fnu)]


def _op(*args: Any) -> torch.Tensor:
    """`multiply` as an op, for compiled code: torch 2.11 does not trace into scaled_mm."""
    columns = args[0].shape[1] * block_formats.per_byte(args[3])
    a, b = (Blocks._make((*each, columns)) for each in (args[:4], args[4:8]))
    return multiply(a, b, *args[8:])


_NAME = "gemm_blocks_vendor"
_SCHEMA = (
    "(Tensor a, Tensor a_scale_inv, Tensor? a_tensor_scale_inv, str a_fmt, Tensor b, "
    "Tensor b_scale_inv, Tensor? b_tensor_scale_inv, str b_fmt, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor"
)
library.LIBRARY.define(_NAME + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
library.LIBRARY.impl(_NAME, _op, "CUDA")
torch.library.register_fake(
    f"mixprec::{_NAME}",
    lambda a, *rest: a.new_empty((a.shape[0], rest[3].shape[0]), dtype=rest[-1]),
    lib=library.LIBRARY,
)


def reads_swizzled(fmt: str, device: torch.device) -> bool:
    """Whether products of this format on `device` read scales in the swizzled layout."""
    if device.type != "cuda" or (fmt not in MXFP8 and fmt != NVFP4):
        return False
    return _is_used(device.index or 0)


def product(
    a: Blocks, b: Blocks, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor | None:
    """`multiply` on a GPU; None where torch has no such call, or not for this one."""
    index = a.data.device.index or 0
    if why_not(a, b, library.capability(index)) or not _is_used(index) or not _ready(index):
        return None
    if torch.compiler.is_compiling():
        return torch.ops.mixprec.gemm_blocks_vendor(*a[:4], *b[:4], bias, out_dtype)
    return multiply(a, b, bias, out_dtype)


def _is_used(index: int) -> bool:
    """Whether GPU `index` is to multiply block formats itself, as far as is known."""
    capability = library.capability(index)
    able = capability is not None and capability[0] in CAPABILITIES
    return able and context.backend in (None, "vendor") and _why_left_out(index) is None


def _why_left_out(index: int) -> str | None:
    return backends.disabled("vendor", "gemm") or _left_out.get(index)


# Constant for the process: torch.compile need not trace into the environment.
_why_left_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _ready(index: int) -> bool:
    """Whether a product of small integers with it on GPU `index`, the first time, is exact."""
    if index not in _left_out:
        product = "torch's product of block formats"
        if not self_check.is_possible("gemm", product, "it is compared with the exact one"):
            return True
        with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
            _left_out[index] = reason = difference(f"cuda:{index}")
        if reason is not None:
            self_check.report("gemm", reason, "Block formats are decoded to bfloat16 instead")
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
        codes = block_formats.join(codes)
        tensor = torch.full((), 0.5, dtype=torch.float32, device=device)
        stored = block_formats.encode(scale, E4M3, None).view(torch.float8_e4m3fn)
        wide = wide / 2
    else:
        stored = (exponent + 127).to(torch.uint8)
    data = codes.view(block.element.dtype).to(device)
    return Blocks(data, stored.to(device), tensor, fmt, k), wide.to(device)


_CUBLAS = (12, 9)  # the CUDA version whose cuBLAS has them


def _squares(scale_shape: torch.Size, rows: int, k: int) -> bool | None:
    """Whether an operand [rows, k] has a scale for each 128 x 128, or for each 1 x 128; None for
    neither."""
    across = -(-k // BLOCK)
    if scale_shape == (rows, across):
        return False
    return True if scale_shape == (-(-rows // BLOCK), across) else None


def why_not_fp32_scales(operands: Any, capability: Capability | None) -> str | None:
    """Why torch has no single call for scales that are neither per tensor nor per row."""
    a, b, a_scale_inv, b_scale_inv = operands
    who, (m, k), n = "torch.nn.functional.scaled_mm", a.shape, b.shape[1]
    if not a.dtype == b.dtype == torch.float8_e4m3fn:
        return f"{who} takes scales of blocks for float8_e4m3fn operands only"
    if capability is not None and capability[0] != 9:
        return f"{who} takes scales of blocks of 128 on compute capability 9 only"
    cuda = torch.version.cuda
    if cuda is not None and tuple(map(int, cuda.split(".")[:2])) < _CUBLAS:
        return f"{who} takes scales of blocks with CUDA 12.9 or later, this torch has {cuda}"
    squares_a, squares_b = _squares(a_scale_inv.shape, m, k), _squares(b_scale_inv.t().shape, n, k)
    if squares_a is None or squares_b is None or (squares_a and squares_b):
        return (
            f"{who} takes scales of blocks per 1 x 128, of one operand also per 128 x 128, got "
            f"{tuple(a_scale_inv.shape)} and {tuple(b_scale_inv.shape)}"
        )
    if k % BLOCK or (squares_a and m % BLOCK) or (squares_b and n % BLOCK) or m % 4:
        return (
            f"{who} with scales of blocks needs whole blocks and M that is a multiple of 4, got "
            f"M = {m}, N = {n}, K = {k}"
        )
    return None


def multiply_fp32_scales(
    operands: Any, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """What `why_not` accepts. Never with fast accumulation: each 128 of K is added in FP32."""
    a, b, a_scale_inv, b_scale_inv = operands
    scale_a, recipe_a = _fp32_scales(a_scale_inv, a)
    scale_b, recipe_b = _fp32_scales(b_scale_inv.t(), b.t())
    return functional.scaled_mm(
        a, b, scale_a, recipe_a, scale_b, recipe_b, bias=bias, output_dtype=out_dtype
    )


def _fp32_scales(
    scale_inv: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, functional.ScalingType]:
    """The scales of x [R, K] as cuBLAS reads them, and their kind: per 1 x 128 [R, K / 128], column
    by column; per 128 x 128 [K / 128 up to a multiple of 4, R / 128], column by column."""
    if not _squares(scale_inv.shape, *x.shape):
        return scale_inv.t().contiguous().t(), functional.ScalingType.BlockWise1x128
    padded = functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous()
    return padded.t(), functional.ScalingType.BlockWise128x128
