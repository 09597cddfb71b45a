"""quantize_mx: a tensor in a block format, MX or NVFP4, and, if asked, its transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..formats import E4M3
from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import block_formats, rounding, scale_layout
from ._reference.block_formats import BlockFormat
from ._reference.scale_layout import contiguous_copy
from .scale import amax_reference, scale_from_amax

# data, data_t, scale_inv, scale_inv_t, tensor_scale_inv, amax
BlockCast = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
Pair = tuple[torch.Tensor, torch.Tensor]
Bits = Callable[[torch.Size], torch.Tensor] | None
_LARGEST = torch.finfo(torch.float32).max


def _value(code: torch.Tensor, block: BlockFormat) -> torch.Tensor:
    return block_formats.scales(block, code.view(block.scale_dtype), None)


def _error(
    blocks: torch.Tensor, code: torch.Tensor, inverse: torch.Tensor, outer: torch.Tensor,
    block: BlockFormat,
) -> torch.Tensor:  # fmt: skip
    """The sum over each block, in order, of |x' - x| or (x' - x)^2."""
    total, scale = torch.zeros_like(inverse), _value(code, block)
    for x in blocks.unbind(-1):
        codes = block_formats.encode(x * inverse, block.element, None)
        values = block_formats.decode(codes, block.element) * scale * outer / (6.0 * block.bound)
        off = values - x
        total = total + (off * off if block.adaptive == "mse" else off.abs())
    return total


def _nvfp4_scale(
    blocks: torch.Tensor, amax: torch.Tensor, outer: torch.Tensor, scale: torch.Tensor,
    block: BlockFormat, up: bool,
) -> Pair:  # fmt: skip
    """The codes of the scales, and what elements are multiplied with. outer, scale: the amax and
    the FP32 scale of what shares that; up: no scale is rounded down."""

    def rounded(exact: torch.Tensor) -> Pair:
        code = block_formats.encode(exact, block.scale, None)
        if up:
            code += (_value(code, block) < exact) & (exact < block.scale.max)
        if block.eden:  # a scale of 1 in place of 0
            code = torch.where(code == 0, 0x38, code)
        return code, (1.0 / (_value(code, block) * (1.0 / scale))).clamp(max=_LARGEST)

    if not block.adaptive:
        by_reciprocal = scale * (block.factor / 6.0)
        return rounded(amax * (by_reciprocal if block.nearest else scale / (6.0 / block.factor)))
    exact = amax / 6.0 * scale
    four, six = rounded(exact * 1.5), rounded(exact)
    better = _error(blocks, *four, outer, block) < _error(blocks, *six, outer, block)
    return torch.where(better, four[0], six[0]), torch.where(better, four[1], six[1])


def _corrected(
    code: torch.Tensor, values: torch.Tensor, data: torch.Tensor, block: BlockFormat, bits: Bits
) -> torch.Tensor:
    """The scales of blocks [M, blocks] times sum(v^2) / sum(v q) over the 128 that they are in, for
    elements q of values v."""
    rounded = block_formats.decode(data, block.element)
    sums = torch.stack([(values * values).sum(-1), (values * rounded).sum(-1)])
    over, under = functional.pad(sums, (0, -code.shape[1] % 8)).unflatten(-1, (-1, 8)).sum(-1)
    ratio = torch.where(under == 0, 1.0, over / under).repeat_interleave(8, 1)[:, : code.shape[1]]
    return block_formats.encode(
        _value(code, block) * ratio, block.scale, None if bits is None else bits(code.shape)
    )


def _by_blocks(
    rows: torch.Tensor, block: BlockFormat, mode: str, outer: torch.Tensor, scale: torch.Tensor,
    bits: Bits,
) -> Pair:  # fmt: skip
    """The codes of rows [M, K] in FP32, one a byte, and those of the scales [M, blocks]. outer,
    scale: the amax of what shares an FP32 scale, and that; bits: 16 random ones for each number."""
    (m, k), (height, width) = rows.shape, (block.rows, block.block)
    down, across = -(-m // height), -(-k // width)
    padded = functional.pad(rows, (0, across * width - k, 0, down * height - m))
    blocks = padded.reshape(down, height, across, width).transpose(1, 2).flatten(2)
    amax = blocks.abs().amax(-1) if blocks.numel() else blocks.new_zeros((down, across))
    finite = amax.isfinite()
    amax, blocks = torch.where(finite, amax, 0.0), torch.where(finite[..., None], blocks, 0.0)
    if block.nvfp4:
        up = bits is not None and not (block.nearest or block.eden)
        outer, scale = (block_formats.by_blocks(t, across) for t in (outer, scale))
        code, inverse = _nvfp4_scale(blocks, amax, outer, scale, block, up)
    else:
        code = block_formats.e8m0(amax, block.element, mode)
        inverse = (254 - code << 23).view(torch.float32)  # 2^-X, always normal
    values = blocks * inverse[..., None]
    random = None if bits is None or block.eden else bits(values.shape)
    data = block_formats.encode(values, block.element, random)
    if block.eden:
        code = _corrected(code, values, data, block, bits)
    nan = 0x7F if block.scale_dtype == torch.float8_e4m3fn else 0xFF
    code = torch.where(finite, code, nan).to(torch.uint8)
    data = data.reshape(down, across, height, width).transpose(1, 2).reshape(padded.shape)
    return data[:m, :k], code.repeat_interleave(height, 0)[:m]


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
    rows = x.float().reshape(scale_layout.as_matrix(x.shape))
    outer = amax if block.casts_transpose else scale_layout.block_amax(rows, str(block.outer))
    scale = torch.ones_like(outer)
    if block.outer is not None:
        scale = scale_from_amax(outer, 6.0 * block.bound / block.factor, 0, False, scale)

    def cast(matrix: torch.Tensor, stream: int) -> Pair:
        def bits(shape: torch.Size) -> torch.Tensor:
            first = torch.zeros((), dtype=torch.int64, device=x.device)
            return rounding.random_bits(shape, seed, first, 0, stream)

        return _by_blocks(matrix, block, scale_mode, outer, scale, None if seed is None else bits)

    def stored(codes: torch.Tensor, scales: torch.Tensor) -> Pair:
        codes = block_formats.join(codes) if block.element.bits == 4 else codes
        scales = contiguous_copy(scales).view(block.scale_dtype)
        scales = scale_layout.swizzle(scales) if swizzled else scales
        return contiguous_copy(codes).view(block.element.dtype), scales

    codes, scales = cast(rows, 0)
    data, scale_inv = stored(codes, scales)
    data_t, scale_inv_t = data.new_empty((0, 0)), scale_inv.new_empty((0,))
    if transpose and block.rows > 1:  # also where they are random, those of x
        of_blocks = scales[:: block.rows].t().repeat_interleave(block.rows, 0)[: rows.shape[1]]
        data_t, scale_inv_t = stored(codes.t(), of_blocks)
    elif transpose:
        data_t, scale_inv_t = stored(*cast(rows.t(), 1))
    tensor_scale_inv = amax.new_empty((0,)) if block.outer is None else 1.0 / scale
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
    if transpose and not block.casts_transpose:
        raise ValueError(
            f"{op}: transpose must be False for {fmt}, whose FP32 scales are of rows: cast x^T"
        )
    if transpose and x.dim() < 2:
        raise ValueError(f"{op}: transpose needs x of 2 or more dimensions, got {tuple(x.shape)}")
    checks.matches(op, "seed", seed, (torch.int64,), x, (1,), "one number")


def _fake(x: torch.Tensor, fmt: str, transpose: bool, swizzled: bool, with_amax: bool) -> BlockCast:
    block = block_formats.parse("quantize_mx", fmt)
    m, k = scale_layout.as_matrix(x.shape)
    across, (size_t, across_t) = block_formats.sizes(fmt, k)[1], block_formats.sizes(fmt, m)
    codes, scales, outer = block.element.dtype, block.scale_dtype, block.outer
    shape_of = scale_layout.swizzled_shape if swizzled else lambda *shape: shape
    shape = (0,) if outer is None else scale_layout.scale_shape(outer, m, k)
    return (
        x.new_empty(_data_shape(x.shape, fmt), dtype=codes),
        x.new_empty((k, size_t) if transpose else (0, 0), dtype=codes),
        x.new_empty(shape_of(m, across), dtype=scales),
        x.new_empty(shape_of(k, across_t) if transpose else (0,), dtype=scales),
        x.new_empty(shape, dtype=torch.float32),
        x.new_empty(() if with_amax or block.nvfp4 else (0,), dtype=torch.float32),
    )


def _no_kernel(args: Any, _: Any) -> str | None:
    plain = args.fmt in block_formats.BLOCK_FORMATS
    return None if plain else f"no kernel has been written for {args.fmt}"


def _no_cpu_kernel(args: Any, _: Any) -> str | None:
    block = block_formats.parse("quantize_mx", args.fmt)
    squares = block.rows > 1 and (args.seed is not None or block.adaptive)
    has = block.casts_transpose and block.scale == E4M3 and not (block.eden or squares)
    return None if has else _no_kernel(args, None)


quantize_mx_op = Op(
    "quantize_mx",
    "(Tensor x, str fmt, str scale_mode, bool transpose, Tensor? seed, bool swizzled, "
    "bool with_amax) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=quantize_mx_reference,
    fake=_fake,
    check=_check,
    triton="quantize_mx",
    refuses={"cpp": _no_cpu_kernel, "cuda": _no_kernel, "triton": _no_kernel},
)
