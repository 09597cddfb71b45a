"""Optimizer states in 8 bits: blocks of 256 elements that share a scale.

The formulas are those of csrc/math/state8.h. SIGNED is a constexpr: exp_avg is, exp_avg_sq is not.
"""

import triton
import triton.language as tl

from .philox import random16
from .tiles import magnitude_bits

ELEMENTS = tl.constexpr(256)  # of a block
PER_BLOCK = tl.constexpr(3)  # the array of random bits that the elements of a block share


@triton.jit
def _scale_at(scale_ptr, start, n, BLOCK: tl.constexpr):
    """Pointers to the scales of elements [start, start + BLOCK), and which of them exist."""
    blocks = start // ELEMENTS + tl.arange(0, BLOCK // ELEMENTS)
    return scale_ptr + blocks, blocks * ELEMENTS < n


@triton.jit
def decode_codes(codes, scale_ptr, start, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The fp32 values of codes [BLOCK] from element `start` on."""
    at, exists = _scale_at(scale_ptr, start, n, BLOCK)
    scale = tl.load(at, mask=exists, other=1.0)
    HALF: tl.constexpr = 64 if SIGNED else 128  # the first code whose fraction has 4 bits
    MIDDLE: tl.constexpr = (124 if SIGNED else 120) << 23  # the bits of its value
    UPPER: tl.constexpr = 0x7FF - (2 * HALF - 1)
    LOWER: tl.constexpr = (MIDDLE >> 20) - HALF
    code = codes.to(tl.int32)
    c = code & (2 * HALF - 1)
    bits = tl.minimum(c + UPPER, 2 * (c + LOWER)) << 19
    bits = tl.where(c == 0, 0, bits)
    if SIGNED:
        bits = bits | ((code & 0x80) << 24)
    values = tl.reshape(bits.to(tl.float32, bitcast=True), (BLOCK // ELEMENTS, ELEMENTS))
    return tl.reshape(values * scale[:, None], (BLOCK,))


@triton.jit
def block_random(start, key, STREAM: tl.constexpr, BLOCKS: tl.constexpr):
    """16 random bits, as int32 [BLOCKS, ELEMENTS], of each element from `start` (a multiple of
    ELEMENTS) on: those of its place in a block, plus those of the block."""
    in_block = random16(tl.zeros((), tl.int64), key, STREAM, ELEMENTS)
    pairs = tl.reshape(random16(start // ELEMENTS * 2, key, PER_BLOCK, 2 * BLOCKS), (BLOCKS, 2))
    mine = tl.arange(0, 2)[None, :] == (1 if STREAM == 2 else 0)
    of_block = tl.sum(tl.where(mine, pairs.to(tl.int32), 0), axis=1)
    return (in_block.to(tl.int32)[None, :] + of_block[:, None]) & 0xFFFF


@triton.jit
def encode_codes(x, scale_ptr, start, n, key, SIGNED: tl.constexpr, STREAM: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """The codes of x [BLOCK], whose scales are stored. STREAM: 1 or 2, the array of random bits."""
    HALF: tl.constexpr = 64 if SIGNED else 128  # the first code whose fraction has 4 bits
    MIDDLE: tl.constexpr = (124 if SIGNED else 120) << 23  # the bits of its value
    UPPER: tl.constexpr = 0x7FF - (2 * HALF - 1)
    BLOCKS: tl.constexpr = BLOCK // ELEMENTS
    x = tl.reshape(x, (BLOCKS, ELEMENTS))
    place = tl.reshape(start + tl.arange(0, BLOCK), (BLOCKS, ELEMENTS))
    magnitude = tl.where(place < n, magnitude_bits(x), 0)
    largest = tl.minimum(tl.max(magnitude, axis=1), 0x7F800000)  # as integers, NaN > Inf
    scale = tl.maximum((largest + 0x7FFFF) & 0x7F800000, 27 << 23)
    scale = tl.where(scale > (253 << 23), 0x7F800000, scale)
    at, exists = _scale_at(scale_ptr, start, n, BLOCK)
    tl.store(at, scale.to(tl.float32, bitcast=True), mask=exists)
    finite = scale < 0x7F800000
    inverse = tl.where(finite, (254 << 23) - scale, 0).to(tl.float32, bitcast=True)

    y = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
    y = tl.where(finite[:, None], y, 0.0)
    u = y.to(tl.int32, bitcast=True)
    # The code times 2^16; below code 1 linear, or code 1 for what must not become 0.
    position = ((u + tl.maximum(u, MIDDLE)) >> 4) - (UPPER << 16)
    low = u
    if SIGNED:
        low = (y * 119304648.0).to(tl.int32)  # 2^16 / (1.125 * 2^-11) in fp32
    position = tl.maximum(position, tl.minimum(low, 65536))

    code = (position + block_random(start, key, STREAM, BLOCKS)) >> 16
    if SIGNED:
        code = code | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    code = tl.where(finite[:, None], code, 0)
    return tl.reshape(code.to(tl.uint8), (BLOCK,))
