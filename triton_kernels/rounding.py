"""fp32 to bf16 by stochastic rounding, or as a split into a bf16 param and a remainder.

bf16 and remainders are unsigned integers here, as the kernels load them.
"""

import triton
import triton.language as tl

from .tiles import encode, magnitude_bits


@triton.jit
def stochastic_bf16(x, bits, SOFT_CAST: tl.constexpr):
    """One of x's two neighbours, the larger with a probability of (the 16 bits cut off) / 2^16.

    Inf and NaN are kept: a carry could run through a NaN into its sign.
    """
    rounded = ((x.to(tl.uint32, bitcast=True) + bits) >> 16).to(tl.uint16)
    finite = magnitude_bits(x) < 0x7F800000
    return tl.where(finite, rounded, encode(x, x, "bf16", SOFT_CAST))


@triton.jit
def stochastic_24(x, bits):
    """x with 24 bits: the last 8 are cut off, and one unit more in magnitude with a probability of
    (these bits) / 2^8, by the lower 8 random bits. Inf and NaN are kept."""
    rounded = (x.to(tl.uint32, bitcast=True) + (bits & 0xFF)) & 0xFFFFFF00
    return tl.where(magnitude_bits(x) < 0x7F800000, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def split_master(master, SOFT_CAST: tl.constexpr):
    """An fp32 master as bf16, to nearest, ties away from zero, and the int16 difference in bits.

    With ties to even a tie could not be restored: it could belong to either neighbour.
    """
    bits = master.to(tl.uint32, bitcast=True)
    nan = magnitude_bits(master) > 0x7F800000
    high = ((bits + 0x8000) >> 16).to(tl.uint16)
    param = tl.where(nan, encode(master, master, "bf16", SOFT_CAST), high)
    return param, tl.where(nan, 0, bits & 0xFFFF).to(tl.uint16)


@triton.jit
def join_master(param, remainder):
    """The inverse of split_master; a remainder of 8 bits has the upper ones of 16. A param that was
    set to zero from outside stays zero: the remainder cannot be subtracted from it."""
    if remainder.dtype == tl.uint8:
        remainder = remainder.to(tl.uint16) << 8
    low = remainder.to(tl.int16, bitcast=True).to(tl.int32)
    low = tl.where(((param & 0x7FFF) == 0) & (low < 0), 0, low)
    return ((param.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
