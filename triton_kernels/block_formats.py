"""The block formats, MX and NVFP4, as constants of kernels; their scales and elements.

The same as csrc/math/mx.h. Elements of FP8 are cast by tiles.py where they are rounded to nearest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .tiles import decode, encode, magnitude_bits

# Bits of a code and of its mantissa, the exponents of the smallest normal and of the largest number
# as those of FP32, and the bits of the latter.
_ELEMENTS = {
    "e4m3": (8, 3, 121, 0x43E00000),
    "e5m2": (8, 2, 113, 0x47600000),
    "e3m2": (6, 2, 125, 0x41E00000),
    "e2m3": (6, 3, 127, 0x40F00000),
    "e2m1": (4, 1, 127, 0x40C00000),
}
_NAMES = {
    "mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3",
    "mxfp4": "e2m1", "nvfp4": "e2m1",
}  # fmt: skip
DTYPES = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}  # others: uint8


def constants(fmt: str) -> dict[str, Any]:
    """The format as arguments of a kernel."""
    name = _NAMES[fmt]
    bits, mantissa, least, largest = _ELEMENTS[name]
    return {
        "ELEMENT": name, "BITS": bits, "MANTISSA": mantissa, "LEAST": least, "MAX_BITS": largest,
        "NVFP4": fmt == "nvfp4", "BLOCK": 16 if fmt == "nvfp4" else 32,
    }  # fmt: skip


def sizes(fmt: str, columns: int) -> tuple[int, int]:
    """The bytes of codes and the number of scales of a row."""
    per_byte = 2 if _ELEMENTS[_NAMES[fmt]][0] == 4 else 1
    return triton.cdiv(columns, per_byte), triton.cdiv(columns, 16 if fmt == "nvfp4" else 32)


def rounding_of_amax(fmt: str, mode: str) -> int:
    """What is added to the bits of the amax of a block before its exponent is taken."""
    _, mantissa, _, largest = _ELEMENTS[_NAMES[fmt]]
    return {
        "floor": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - mantissa),
        "rceil": 0x7FFFFF - (largest & 0x7FFFFF),
    }[mode]


@triton.jit
def mx_scale(amax, add, MAX_BITS: tl.constexpr):
    """The codes of E8M0 scales, and what elements are multiplied with, of finite blocks; amax: bits
    in int32."""
    code = ((amax + add) >> 23) - ((MAX_BITS >> 23) - 127)
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
def encode_element(y, random, ELEMENT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
                   LEAST: tl.constexpr, MAX_BITS: tl.constexpr,
                   SOFT_CAST: tl.constexpr):  # fmt: skip
    """The codes of y, which is not NaN, in uint8, saturated: to nearest, ties to even, or, with 16
    random bits each, up if these carry with the part of a step that is cut off."""
    if BITS == 8 and random is None:
        code = encode(y, y, ELEMENT, SOFT_CAST)
    else:
        u = magnitude_bits(y)
        u = tl.where(u < MAX_BITS, u, MAX_BITS)
        exponent = tl.maximum(u >> 23, LEAST)
        unit = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
        steps = u.to(tl.float32, bitcast=True) * unit
        if random is None:  # the sum has no bits below 1
            whole = (steps + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        else:
            whole = ((steps * 65536.0).to(tl.int32) + random.to(tl.int32)) >> 16
        sign = (y.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << (BITS - 1)
        code = (whole + ((exponent - LEAST) << MANTISSA)) | sign
    return code.to(tl.uint8)


@triton.jit
def decode_element(code, ELEMENT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
                   LEAST: tl.constexpr, SOFT_CAST: tl.constexpr):  # fmt: skip
    """uint8 codes to fp32, exactly; what is above their bits is ignored."""
    if BITS == 8:
        return decode(code, ELEMENT, SOFT_CAST)
    else:
        wide = code.to(tl.int32)
        magnitude = wide & ((1 << (BITS - 1)) - 1)
        field = magnitude >> MANTISSA
        field = tl.where(field > 0, field - 1, 0)
        steps = (magnitude - (field << MANTISSA)).to(tl.float32)
        value = steps * ((field + (LEAST - MANTISSA)) << 23).to(tl.float32, bitcast=True)
        sign = (wide >> (BITS - 1)) << 31  # by its bit: -value is 0 - value in Triton 3.6 and 3.7
        return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
