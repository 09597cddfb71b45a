"""The block formats, MX and NVFP4, as constants of kernels; their scales and elements.

The same as csrc/math/mx.h. Elements of FP8 are cast by tiles.py where they are rounded to nearest.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .tiles import decode, encode, magnitude_bits


class Format(NamedTuple):
    """A block format as an argument of a kernel; all are constexprs."""

    ELEMENT: Any
    BITS: Any  # of a code
    MANTISSA: Any  # bits of it
    LEAST: Any  # the exponent of the smallest normal number, as that of FP32
    MAX_BITS: Any  # of the largest number in FP32
    NVFP4: Any
    BLOCK: Any


_FORMATS = {
    "mxfp8_e4m3": ("e4m3", 8, 3, 121, 0x43E00000, False, 32),
    "mxfp8_e5m2": ("e5m2", 8, 2, 113, 0x47600000, False, 32),
    "mxfp6_e3m2": ("e3m2", 6, 2, 125, 0x41E00000, False, 32),
    "mxfp6_e2m3": ("e2m3", 6, 3, 127, 0x40F00000, False, 32),
    "mxfp4": ("e2m1", 4, 1, 127, 0x40C00000, False, 32),
    "nvfp4": ("e2m1", 4, 1, 127, 0x40C00000, True, 16),
}
DTYPES = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}  # others: uint8


@cache
def format_of(fmt: str) -> Format:
    return Format(*map(tl.constexpr, _FORMATS[fmt]))


def sizes(fmt: str, columns: int) -> tuple[int, int]:
    """The bytes of codes and the number of scales of a row."""
    _, bits, *_, block = _FORMATS[fmt]
    return triton.cdiv(columns, 2 if bits == 4 else 1), triton.cdiv(columns, block)


def rounding_of_amax(fmt: str, mode: str) -> int:
    """What is added to the bits of the amax of a block before its exponent is taken."""
    _, _, mantissa, _, largest, *_ = _FORMATS[fmt]
    return {
        "floor": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - mantissa),
        "rceil": 0x7FFFFF - (largest & 0x7FFFFF),
    }[mode]


@triton.jit
def mx_scale(amax, add, F):
    """The codes of E8M0 scales, and what elements are multiplied with, of finite blocks; amax: bits
    in int32."""
    code = ((amax + add) >> 23) - ((F.MAX_BITS >> 23) - 127)
    code = tl.where(code < 0, 0, code)
    factor = ((254 - code) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, 255, code).to(tl.uint8), factor


@triton.jit
def nvfp4_scale(amax, scale, UP: tl.constexpr, SOFT_CAST: tl.constexpr):
    """The same of E4M3 scales; scale: that of the tensor. UP: rounded up, for stochastic codes."""
    sixth = tl.div_rn(scale, tl.zeros_like(scale) + 6.0)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    y = tl.where(amax >= 0x7F800000, 0, amax).to(tl.float32, bitcast=True) * sixth
    code = encode(y, y, "e4m3", SOFT_CAST)
    if UP:
        below = (decode(code, "e4m3", SOFT_CAST) < y) & (code < 0x7E)  # 0x7E: 448
        code = tl.where(below, code + 1, code)
    factor = tl.div_rn(tl.zeros_like(y) + 1.0, decode(code, "e4m3", SOFT_CAST) * inverse)
    largest = tl.full(factor.shape, 0x7F7FFFFF, tl.int32).to(tl.float32, bitcast=True)
    factor = tl.where(factor < largest, factor, largest)
    return tl.where(amax >= 0x7F800000, 0x7F, code).to(tl.uint8), factor


@triton.jit
def encode_element(y, random, F, SOFT_CAST: tl.constexpr):
    """The codes of y, which is not NaN, in uint8, saturated: to nearest, ties to even, or, with 16
    random bits each, up if these carry with the part of a step that is cut off."""
    if F.BITS == 8 and random is None:
        code = encode(y, y, F.ELEMENT, SOFT_CAST)
    else:
        u = magnitude_bits(y)
        u = tl.where(u < F.MAX_BITS, u, F.MAX_BITS)
        exponent = tl.maximum(u >> 23, F.LEAST)
        inverse = tl.zeros_like(exponent) + (254 + F.MANTISSA) - exponent
        unit = (inverse << 23).to(tl.float32, bitcast=True)
        steps = u.to(tl.float32, bitcast=True) * unit
        if random is None:  # the sum has no bits below 1
            whole = (steps + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        else:
            whole = ((steps * 65536.0).to(tl.int32) + random.to(tl.int32)) >> 16
        sign = (y.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << (F.BITS - 1)
        code = (whole + ((exponent - F.LEAST) << F.MANTISSA)) | sign
    return code.to(tl.uint8)


@triton.jit
def decode_element(code, F, SOFT_CAST: tl.constexpr):
    """uint8 codes to fp32, exactly; what is above their bits is ignored."""
    if F.BITS == 8:
        return decode(code, F.ELEMENT, SOFT_CAST)
    else:
        wide = code.to(tl.int32)
        above = wide >> (F.BITS - 1)
        magnitude = wide - (above << (F.BITS - 1))
        field = magnitude >> F.MANTISSA
        field = tl.where(field > 0, field - 1, 0)
        steps = (magnitude - (field << F.MANTISSA)).to(tl.float32)
        value = steps * ((field + (F.LEAST - F.MANTISSA)) << 23).to(tl.float32, bitcast=True)
        sign = above << 31  # by its bit: -value is 0 - value in Triton 3.6 and 3.7
        return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
