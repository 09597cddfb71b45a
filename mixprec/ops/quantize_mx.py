"""quantize_mx: a tensor in a block format, MX or NVFP4, and, if asked, its transpose."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import E4M3
from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import block_formats, rounding, scale_layout
from ._reference.scale_layout import contiguous_copy
from .scale import amax_reference, scale_from_amax

# data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax
BlockCast = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
Pair = tuple[torch.Tensor, torch.Tensor]
_LARGEST = torch.finfo(torch.float32).max
_NVFP4_MAX = 2688.0  # 6 * 448, the largest element times the largest scale


def _mx_scale(amax: torch.Tensor, block: block_formats.BlockFormat, scale_mode: str) -> Pair:
    """The codes of the scales, and what elements are multiplied with: 2^-X, always normal."""
    code = block_formats.e8m0(amax, block.element, scale_mode)
    return code.to(torch.uint8), (254 - code << 23).view(torch.float32)


def _nvfp4_scale(amax: torch.Tensor, scale: torch.Tensor, up: bool) -> Pair:
    """The same for E4M3 scales beside that of the tensor; up: none is rounded down."""
    exact = amax * (scale / 6.0)
    code = block_formats.encode(exact, E4M3, None)
    if up:
        below = (code.view(torch.float8_e4m3fn).float() < exact) & (code < 0x7E)  # 0x7E: 448
        code += below
    stored = code.view(torch.float8_e4m3fn)
    inverse = 1.0 / (stored.float() * (1.0 / scale))
    return code, inverse.clamp(max=_LARGEST)


def _by_blocks(
    rows: torch.Tensor,
    block: block_formats.BlockFormat,
    scale_mode: str,
    scale: torch.Tensor,
    random: tuple[torch.Tensor, int] | None,
) -> Pair:
    """data and scale_inv of rows [M, K] in FP32. random: the seed and the stream."""
    m, k = rows.shape
    across = -(-k // block.block)
    padded = torch.nn.functional.pad(rows, (0, across * block.block - k))
    blocks = padded.reshape(m, across, block.block)
    amax = blocks.abs().amax(-1) if blocks.numel() else blocks.new_zeros((m, across))
    finite = amax.isfinite()
    known = torch.where(finite, amax, 0.0)
    if block.nvfp4:
        codes, inverse = _nvfp4_scale(known, scale, random is not None)
        codes = torch.where(finite, codes, 0x7F).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        codes, inverse = _mx_scale(known, block, scale_mode)
        codes = torch.where(finite, codes, 0xFF).to(torch.uint8)
    values = torch.where(finite[..., None], blocks, 0.0) * inverse[..., None]
    bits = None
    if random is not None:
        seed, stream = random
        first = torch.zeros((), dtype=torch.int64, device=rows.device)
        bits = rounding.random_bits(values.shape, seed, first, 0, stream)
    data = block_formats.encode(values, block.element, bits).reshape(padded.shape)[:, :k]
    if block.element.bits == 4:
        data = block_formats.join(data)
    return contiguous_copy(data).view(block.element.dtype), contiguous_copy(codes)


def quantize_mx_reference(args: Any) -> BlockCast:
    """Return (data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax): x in a block format.

    x: fp32, bf16 or fp16, any shape and strides, seen as [M, K] with leading dimensions flattened.
    fmt: a name of `block_formats.BLOCK_FORMATS`; blocks are along K. The formulas are in
    docs/numerics.md, section 12.

    data: the codes of the elements, x's shape with a last dimension of K, float8 for E4M3 and E5M2
    and uint8 for E3M2 and E2M3; for E2M1 ceil(K / 2) bytes, the first of two codes in the low half,
    0 beside the last of an odd K. scale_inv: of MX uint8 [M, ceil(K / 32)], code c for 2^(c - 127)
    and 255 for NaN; of "nvfp4" float8_e4m3fn [M, ceil(K / 16)], and tensor_scale_inv fp32 [], else
    [0]. transpose: also data_t [K, M or ceil(M / 2)] and scale_inv_t [K, blocks of M], x^T in
    blocks along M, from x itself; otherwise [0, 0] and [0]. amax: fp32 [], max |x|; [0] of MX
    without with_amax, which saves a launch.

    swizzled: scale_inv and scale_inv_t in the layout of `scale_layout.swizzle`, with zeros in its
    padding.

    scale_mode: how MX scales follow from the amax of a block: "floor", "ceil", "even" or "rceil"
    ("rceil" for nvfp4, which does not use it). seed: None, which rounds to nearest, ties to even,
    or int64 [1] on x's device: elements are rounded stochastically, with the random bits of the
    seed, and the scales of nvfp4 up, so that no element saturates. Finite values saturate; a block
    with Inf or NaN has the scale NaN and elements 0.

    ValueError or TypeError names an invalid argument.
    """
    x, fmt, scale_mode, transpose, seed, swizzled, with_amax = args
    block = block_formats.parse("quantize_mx", fmt)
    amax = amax_reference(x)
    m, k = scale_layout.as_matrix(x.shape)
    rows = x.float().reshape(m, k)
    one = torch.ones_like(amax)
    scale = scale_from_amax(amax, _NVFP4_MAX, 0, False, one) if block.nvfp4 else one
    streams = [None if seed is None else (seed, stream) for stream in range(2)]
    data, scale_inv = _by_blocks(rows, block, scale_mode, scale, streams[0])
    if transpose:
        data_t, scale_inv_t = _by_blocks(rows.t(), block, scale_mode, scale, streams[1])
    else:
        data_t, scale_inv_t = data.new_empty((0, 0)), scale_inv.new_empty((0,))
    if swizzled:
        scale_inv = scale_layout.swizzle(scale_inv)
        scale_inv_t = scale_layout.swizzle(scale_inv_t) if transpose else scale_inv_t
    tensor_scale_inv = 1.0 / scale if block.nvfp4 else amax.new_empty((0,))
    if not (with_amax or block.nvfp4):
        amax = amax.new_empty((0,))
    data = data.reshape(_data_shape(x.shape, fmt))
    return data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax


def _data_shape(shape: torch.Size, fmt: str) -> tuple[int, ...]:
    if len(shape) == 0:
        return ()
    return (*shape[:-1], block_formats.sizes(fmt, shape[-1])[0])


def _check(
    x: torch.Tensor, fmt: str, scale_mode: str, transpose: bool, seed: torch.Tensor | None
) -> None:
    op = "quantize_mx"
    checks.has_dtype(op, "x", x, checks.FLOATS)
    block = block_formats.parse(op, fmt)
    if scale_mode not in block_formats.SCALE_MODES:
        names = ", ".join(f'"{name}"' for name in block_formats.SCALE_MODES)
        raise ValueError(f"{op}: scale_mode must be one of {names}, got {scale_mode!r}")
    default = block_formats.DEFAULT_SCALE_MODE
    if block.nvfp4 and scale_mode != default:
        raise ValueError(
            f'{op}: scale_mode must be "{default}", the default, for nvfp4, whose scales are no '
            f"powers of two, got {scale_mode!r}"
        )
    if transpose and x.dim() < 2:
        raise ValueError(f"{op}: transpose needs x of 2 or more dimensions, got {tuple(x.shape)}")
    checks.matches(op, "seed", seed, (torch.int64,), x, (1,), "one number")


def _fake(x: torch.Tensor, fmt: str, transpose: bool, swizzled: bool, with_amax: bool) -> BlockCast:
    block = block_formats.parse("quantize_mx", fmt)
    m, k = scale_layout.as_matrix(x.shape)
    across, (size_t, across_t) = block_formats.sizes(fmt, k)[1], block_formats.sizes(fmt, m)
    codes, scales = block.element.dtype, torch.float8_e4m3fn if block.nvfp4 else torch.uint8
    shape_of = scale_layout.swizzled_shape if swizzled else lambda *shape: shape
    return (
        x.new_empty(_data_shape(x.shape, fmt), dtype=codes),
        x.new_empty((k, size_t) if transpose else (0, 0), dtype=codes),
        x.new_empty(shape_of(m, across), dtype=scales),
        x.new_empty(shape_of(k, across_t) if transpose else (0,), dtype=scales),
        x.new_empty(() if block.nvfp4 else (0,), dtype=torch.float32),
        x.new_empty(() if with_amax or block.nvfp4 else (0,), dtype=torch.float32),
    )


quantize_mx_op = Op(
    "quantize_mx",
    "(Tensor x, str fmt, str scale_mode, bool transpose, Tensor? seed, bool swizzled, "
    "bool with_amax) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=quantize_mx_reference,
    fake=_fake,
    check=_check,
    triton="quantize_mx",
)
