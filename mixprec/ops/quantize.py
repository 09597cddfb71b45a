"""quantize: a tensor to FP8, FP16 or BF16, with its scale, amax and, if asked, transpose."""

from __future__ import annotations

import math

import torch

from .. import formats
from ..quantized import Quantized
from ._dispatch import casts, checks
from ._dispatch.casts import Cast
from ._dispatch.op import Op
from ._reference import block_formats, scale_layout
from ._reference.scale_layout import contiguous_copy
from .quantize_mx import quantize_mx_op, quantize_mx_reference
from .scale import amax_reference, scale_from_amax

_FP8_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
_FP8_INF = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def cast_reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cast(x.float() * scale): one FP32 multiply, one rounding to nearest, ties to even.

    FP8: a finite x saturates to the format's maximum, also where x * scale is infinite; NaN stays
    NaN, Inf becomes NaN in E4M3 and Inf in E5M2. FP16 and BF16: IEEE, overflow gives Inf.
    """
    wide = x.float()
    scaled = wide * scale
    if dtype not in checks.FP8:
        return scaled.to(dtype)
    fmt = formats.parse(dtype)
    code = scaled.clamp(-fmt.max, fmt.max).to(dtype).view(torch.uint8)
    sign = torch.signbit(wide).to(torch.uint8) << 7
    code = torch.where(torch.isinf(wide), sign | _FP8_INF[dtype], code)
    code = torch.where(torch.isnan(wide) | torch.isnan(scaled), sign | _FP8_NAN[dtype], code)
    return code.view(dtype)


def _scale(
    amax: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype, power_of_two: bool
) -> torch.Tensor:
    """The scale of a tensor: the given one unless it is 0 (not initialized); otherwise computed
    from amax for FP8, and 1 for the 16-bit formats. NaN for a given one that is out of range."""
    current = torch.ones_like(amax)
    if dtype in checks.FP8:
        current = scale_from_amax(amax, formats.parse(dtype).max, 0, power_of_two, current)
    if given is None:
        return current
    given = given.reshape(())
    in_range = (given >= checks.MIN_SCALE) & (given <= checks.MAX_SCALE)
    return torch.where(given == 0, current, torch.where(in_range, given, math.nan))


def quantize_reference(x: torch.Tensor, cast: Cast) -> casts.Results:
    """Also with granularity "mx", for the fused ops."""
    dtype, scale, transpose, granularity, power_of_two_scale, record = cast
    if granularity == "mx":
        fmt = block_formats.name_of(formats.parse(dtype), "mx")
        assert fmt is not None, "FP8"
        mode = block_formats.DEFAULT_SCALE_MODE
        results = quantize_mx_reference((x, fmt, mode, transpose, None, False, True))
        return *results[:4], results[5]
    amax = amax_reference(x)
    rows = x.reshape(scale_layout.as_matrix(x.shape))

    def cast_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """data and scale_inv of rows [M, K], each block scaled by its own amax."""
        by_block = granularity != "tensor"
        block_amax = scale_layout.block_amax(rows, granularity) if by_block else amax
        used = _scale(block_amax, scale, dtype, power_of_two_scale)
        data = cast_reference(rows, scale_layout.expand(used, *rows.shape), dtype)
        return contiguous_copy(data), contiguous_copy(1.0 / used)

    data, scale_inv = cast_rows(rows)
    data_t, scale_inv_t = data.new_empty((0, 0)), scale_inv.new_empty((0,))
    if transpose and granularity == "tensor":
        data_t = contiguous_copy(data.t())
    elif transpose:
        data_t, scale_inv_t = cast_rows(rows.t())
    if record is not None:
        record.clamp_min_(amax)
        amax = amax.new_empty((0,))
    return data.reshape(x.shape), data_t, scale_inv, scale_inv_t, amax


def _check(x: torch.Tensor, cast: Cast) -> None:
    op = "quantize"
    formats.parse(cast.dtype, who=op)
    checks.has_dtype(op, "x", x, checks.FLOATS)
    casts.check(op, x, cast)


quantize_op = Op(
    "quantize",
    f"(Tensor x, {casts.SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=quantize_reference,
    fake=casts.fake,
    check=_check,
    triton="quantize",
)


def quantize(
    x: torch.Tensor,
    fmt: formats.Format | str | torch.dtype,
    scale: float | torch.Tensor | None = None,
    transpose: bool = False,
    granularity: str = "tensor",
    power_of_two_scale: bool = True,
    scale_mode: str = "rceil",
    seed: int | torch.Tensor | None = None,
) -> Quantized:
    """Cast x to `fmt`: data = saturate(x * scale), so that x ~ data * scale_inv.

    x: any shape and strides, fp32, bf16 or fp16, seen as [M, K] with leading dimensions flattened.
    fmt: E4M3, E5M2, FP16 or BF16 (a Format, its name or its torch dtype). granularity: which
    elements share a scale, and so the shape of scale_inv, fp32:

        "tensor"        all                            []
        "row"           a row                          [M, 1]
        "block1x128"    128 elements along K of a row  [M, ceil(K / 128)]
        "block128x128"  a square of 128 x 128          [ceil(M / 128), ceil(K / 128)]

    and two of block formats, whose scales are codes:

        "mx"            32 along K: E8M0, a power of two, uint8          [M, ceil(K / 32)]
        "nvfp4"         16 along K: E4M3; an FP32 scale for the tensor   [M, ceil(K / 16)]

    "mx" takes E4M3, E5M2, E3M2, E2M3 and E2M1, "nvfp4" takes E2M1 (Formats or names). After slashes
    they say what differs, as "nvfp4/16x16", with square blocks: docs/formats.md has the list.

    scale: the multiplier before the cast, fp32 with one element (a number is accepted), for
    "tensor" only, in [2^-126, 2^126]: ValueError for another value, or, on a GPU and inside
    torch.compile, where it is not read, NaN results. None, or a tensor that holds 0 (not
    initialized), selects fmt.max / amax, rounded down to a power of two unless power_of_two_scale
    is False (1 where amax is 0 or not finite, and for FP16 and BF16). The other granularities, FP8
    only, compute the scale of each block from its own amax in the same way. The amax returned is
    that of all of x.

    scale_mode, for "mx": how 2^X, by which each block is divided, comes from its amax: "floor",
    the exponents of amax and fmt.max apart (OCP); "ceil" and "even", with that of amax rounded up,
    or to nearest; "rceil", the smallest X for which nothing saturates. docs/numerics.md has the
    formulas, and those of "nvfp4".

    seed, for the block formats: an int, or an int64 tensor [1] on x's device. Elements are then
    rounded up or down at random, with the exact value as the mean, reproducibly for a seed.

    transpose also returns data_t [K, M], x^T quantized with the same granularity: for "tensor" and
    "block128x128" the transpose of data; for the others its rows, and blocks along M, have scales
    of their own, scale_inv_t ([K, 1], [K, ceil(M / 128)]), from x itself.

    Rounding is to nearest, ties to even, without a seed. In FP8 and block formats finite values
    saturate. NaN and Inf are kept in FP8 (Inf is NaN in E4M3); a block that holds one has a scale
    of NaN; FP16 and BF16 overflow to Inf as IEEE 754 says. ValueError names an invalid argument.
    Sources: FP8 Formats for Deep Learning (Micikevicius et al., 2022); DeepSeek-V3 Technical Report
    (2024) for the blocks of 128; OCP Microscaling Formats (MX) 1.0 (2023); Pretraining Large
    Language Models with NVFP4 (NVIDIA, 2025).
    """
    op = "quantize"
    parsed = formats.parse(fmt, who=op)
    if not isinstance(x, torch.Tensor):
        checks.is_tensor(op, "x", x)  # whose other checks are those of the ops
    if x.requires_grad:
        checks.needs_no_grad(op, "use mixprec.functional.linear or matmul, or x.detach()", x)
    if str(granularity).partition("/")[0] in block_formats.GRANULARITIES:
        if scale is not None or power_of_two_scale is not True:
            name, got = ("scale", scale) if scale is not None else ("power_of_two_scale", False)
            raise ValueError(
                f"{op}: {name} must be left out with granularity {granularity!r}, whose scales "
                f"come from x, got {got!r}"
            )
        block = block_formats.name_of(parsed, granularity)
        if block is None:
            raise ValueError(
                f"{op}: fmt must be one of e4m3, e5m2, e3m2, e2m3 and e2m1 with granularity "
                f'"mx", and e2m1 with "nvfp4", got {parsed} with {granularity!r}'
            )
        if seed is not None and not isinstance(seed, torch.Tensor):
            checks.is_int64(op, "seed, if no tensor,", seed)
            seed = torch.tensor([seed], dtype=torch.int64, device=x.device)
        data, data_t, scale_inv, inv_t, outer, amax = quantize_mx_op(
            x, block, scale_mode, transpose, seed, False, True
        )
        data_t, inv_t = (data_t, inv_t) if transpose else (None, None)
        outer = None if outer.dim() == 1 else outer
        columns = scale_layout.as_matrix(x.shape)[1]
        return Quantized(data, scale_inv, amax, data_t, inv_t, parsed, granularity, outer, columns)
    if scale_mode != "rceil" or seed is not None:
        name, given = ("seed", seed) if scale_mode == "rceil" else ("scale_mode", scale_mode)
        raise ValueError(
            f'{op}: {name} is for the granularities "mx" and "nvfp4", got {given!r} with '
            f"granularity {granularity!r}"
        )
    if parsed not in formats.FORMATS:
        raise ValueError(f'{op}: granularity must be "mx" for {parsed}, got {granularity!r}')
    if scale is not None:
        scale = checks.positive_scale(op, "scale", scale, x.device, or_zero=True)
    cast = parsed.dtype, scale, transpose, granularity, power_of_two_scale
    return casts.quantized(quantize_op(x, *cast), parsed, transpose, granularity)


_INT8_MAX = 127.0  # -128 is not used: the codes are symmetric


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data int8 [N, K], scale_inv fp32 [N, 1]) with w ~ data * scale_inv: for inference.

    w: [N, K], fp32, bf16 or fp16. scale = 127 / amax of a row (1 where the row is zero), one FP32
    division; data = w * scale rounded to nearest, ties to even; scale_inv = 1 / scale. Plain torch:
    it runs once per exported weight. ValueError where w is not 2-D or not finite: INT8 has no code
    for Inf or NaN.
    """
    op = "quantize_int8"
    checks.has_dtype(op, "w", w, checks.FLOATS)
    if w.dim() != 2:
        raise ValueError(f"{op}: w must be [N, K], got shape {tuple(w.shape)}")
    wide = w.detach().float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(f"{op}: w must be finite, got Inf or NaN")
    amax = wide.abs().amax(dim=1, keepdim=True) if w.shape[1] else wide.new_zeros(len(w), 1)
    # 127 / amax is Inf for a very small amax: the scale is clamped so that its inverse is normal.
    scale = torch.where(amax == 0, 1.0, _INT8_MAX / amax).clamp(max=2.0**126)
    data = (wide * scale).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return data, 1.0 / scale


def dequantize_int8(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """data int8 [N, K] * scale_inv [N, 1], multiplied in FP32 and rounded once to `dtype`."""
    return (data.float() * scale_inv).to(dtype)
