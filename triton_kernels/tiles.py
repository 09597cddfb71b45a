"""Shared by the kernels: loads and stores, casts, and the formula of a scale.

A low-precision buffer is passed to a kernel as unsigned integers (uint16 or uint8) with its format
as the constexpr FORMAT. There are two conversions to and from fp32 with the same results, chosen by
SOFT_CAST: the GPU's instructions, or integer arithmetic. The latter is for GPUs without fp8
conversions, and for Triton's interpreter, whose bf16 and fp8 casts are wrong.
"""

import triton
import triton.language as tl


@triton.jit
def load(ptr, offsets, n, FULL: tl.constexpr):
    """ptr[offsets], 0 beyond n. FULL: no offset is beyond n, and without a mask loads are wide."""
    if FULL:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=offsets < n, other=0)


@triton.jit
def store(ptr, offsets, value, n, FULL: tl.constexpr):
    if FULL:
        tl.store(ptr + offsets, value)
    else:
        tl.store(ptr + offsets, value, mask=offsets < n)


@triton.jit
def int64(x):
    """An integer, which may also be a constexpr, in 64 bits."""
    return tl.zeros((), tl.int64) + x


@triton.jit
def ceil_div(n, d: tl.constexpr):
    """ceil(n / d) of n > 0. tl.cdiv adds d - 1 first, which is too much for an n near 2^31."""
    return (n - 1) // d + 1


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32, which have the order of |x|, with NaN above Inf above all numbers.
    A floating-point maximum would ignore NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_nonfinite(x):
    """Inf or NaN, of fp32 or fp64."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000) == 0x7FF0000000000000
    else:
        return magnitude_bits(x) >= 0x7F800000


@triton.jit
def ordered_sum(ptr, count, BLOCK: tl.constexpr):
    """The sum of ptr[0:count] (fp64) by one program, in an order that depends only on count."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        sums += tl.load(ptr + offsets, mask=offsets < count, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _decode_fp16(code):
    """fp16 codes, as uint32, to fp32."""
    magnitude = code & 0x7FFF
    normal = (magnitude << 13) + (112 << 23)
    subnormal = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < 0x400, subnormal, normal)
    bits = tl.where(magnitude >= 0x7C00, (magnitude << 13) | 0x7F800000, bits)
    return (bits | ((code & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _decode_e4m3(code):
    """E4M3 codes, as uint32, to fp32."""
    magnitude = code & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < 8, subnormal, normal)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def decode(code, FORMAT: tl.constexpr, SOFT_CAST: tl.constexpr):
    """A loaded value as fp32, exactly (fp64 stays fp64)."""
    if FORMAT == "fp32" or FORMAT == "fp64":
        return code
    elif SOFT_CAST:
        wide = code.to(tl.uint32)
        if FORMAT == "bf16":
            return (wide << 16).to(tl.float32, bitcast=True)
        elif FORMAT == "fp16":
            return _decode_fp16(wide)
        elif FORMAT == "e5m2":  # the high byte of fp16
            return _decode_fp16(wide << 8)
        else:
            return _decode_e4m3(wide)
    elif FORMAT == "bf16":
        return code.to(tl.bfloat16, bitcast=True).to(tl.float32)
    elif FORMAT == "fp16":
        return code.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "e5m2":
        return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def operand(code, FORMAT: tl.constexpr, SOFT_CAST: tl.constexpr):
    """A loaded value as an exact operand of tl.dot: as it is, or decoded from codes if SOFT_CAST.

    FP8 is decoded to fp16, which holds all values of both formats, and bf16 to fp32, which only
    happens in the interpreter.
    """
    if not SOFT_CAST:
        return code
    elif FORMAT == "bf16":
        return decode(code, FORMAT, True)
    elif FORMAT == "fp16":
        return code.to(tl.float16, bitcast=True)
    elif FORMAT == "e5m2":  # the high byte of fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:  # read as fp16 the shifted bits, subnormal ones too, are the value over 2^(15 - 7)
        wide = code.to(tl.uint16)
        magnitude = wide & 0x7F
        value = ((magnitude << 7).to(tl.float16, bitcast=True) * 256.0).to(tl.uint16, bitcast=True)
        bits = tl.where(magnitude == 0x7F, 0x7E00, value) | ((wide & 0x80) << 8)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _round_magnitude(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """|y| (fp32 bits, uint32) to the nearest code, ties to even, unbounded above.

    Normal: add half a unit of the last kept bit, less for an even one, and shift. Subnormal: adding
    a power of two whose last bit is the format's smallest subnormal makes the FPU round.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    MIN_NORMAL: tl.constexpr = (128 - BIAS) << 23
    MAGIC: tl.constexpr = (128 - BIAS - MANTISSA + 23) << 23
    half = ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (tl.where(bits < MIN_NORMAL, MIN_NORMAL, bits) + half - REBIAS) >> SHIFT
    magic = tl.full(bits.shape, MAGIC, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = (bits.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - MAGIC
    return tl.where(bits < MIN_NORMAL, subnormal, normal)


@triton.jit
def _soft_16(y, FORMAT: tl.constexpr):
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    if FORMAT == "bf16":
        code = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = tl.where(magnitude > 0x7F800000, 0x7FC0, code)
    else:
        # from 65520 on the result is Inf; the bound keeps the sum from wrapping around
        code = _round_magnitude(tl.where(magnitude < 0x477FF000, magnitude, 0x477FF000), 10, 15)
        code = tl.where(magnitude > 0x7F800000, 0x7E00, code)
    return (code | sign).to(tl.uint16)


@triton.jit
def _native_fp8(y, INSTRUCTION: tl.constexpr):
    """The conversion of sm_89 and later, one rounding; finite and infinite y saturate, NaN stays.

    In assembly because Triton's own cast goes through fp16 on sm_89 and so rounds twice.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; "
        + INSTRUCTION
        + " low, $2, $1; "
        + INSTRUCTION
        + " high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [y],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _soft_fp8(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr):
    """The same as _native_fp8 in integer arithmetic."""
    magnitude = magnitude_bits(y).to(tl.uint32, bitcast=True)
    code = _round_magnitude(tl.where(magnitude < MAX_BITS, magnitude, MAX_BITS), MANTISSA, BIAS)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(x, y, FORMAT: tl.constexpr, SOFT_CAST: tl.constexpr):
    """y = x * scale as codes of FORMAT: one rounding to nearest, ties to even.

    E4M3 and E5M2: a finite x saturates, even if y is infinite; NaN stays NaN, and an infinite x
    becomes NaN in E4M3, Inf in E5M2. fp16 and bf16: IEEE. fp32 and fp64: y.
    """
    if FORMAT == "fp32" or FORMAT == "fp64":
        return y
    elif FORMAT == "e4m3" or FORMAT == "e5m2":
        if FORMAT == "e4m3":
            INF: tl.constexpr = 0x7F
            if SOFT_CAST:
                code = _soft_fp8(y, 3, 7, 0x43E00000)
            else:
                code = _native_fp8(y, "cvt.rn.satfinite.e4m3x2.f32")
        else:
            INF: tl.constexpr = 0x7C
            if SOFT_CAST:
                code = _soft_fp8(y, 2, 15, 0x47600000)
            else:
                code = _native_fp8(y, "cvt.rn.satfinite.e5m2x2.f32")
        is_inf = (magnitude_bits(x) == 0x7F800000) & (magnitude_bits(y) <= 0x7F800000)
        return tl.where(is_inf, (code & 0x80) | INF, code).to(tl.uint8)
    elif SOFT_CAST:
        return _soft_16(y, FORMAT)
    elif FORMAT == "bf16":
        return y.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        return y.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def scale_from_amax(amax, fmt_max, two_to_minus_margin, previous, POWER_OF_TWO: tl.constexpr):
    """fmt_max / amax * 2^-margin, one rounding in the division; POWER_OF_TWO rounds it down to one.

    Clamped to [2^-126, 2^126], so that its inverse is normal; previous where amax is 0, Inf or NaN.
    """
    fmt_max = tl.zeros_like(amax) + fmt_max
    scale = tl.div_rn(fmt_max, amax) * two_to_minus_margin
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(scale > 8.507059173023462e37, 8.507059173023462e37, scale)
    usable = (amax > 0.0) & (magnitude_bits(amax) < 0x7F800000)
    return tl.where(usable, scale, previous)
