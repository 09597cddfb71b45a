"""Random bits of the updates, and what is rounded with them: fp32 to bf16, a master split into a
bf16 param and a remainder, and states in 8 bits. bf16 and remainders are unsigned integers here, as
the kernels load them.

The random bits are those of csrc/math/philox.h, Philox4x32-10: a function of seed, step, param and
element. Triton's own generator counts in another way. Source: Parallel random numbers: as easy as
1, 2, 3 (Salmon et al., 2011).
"""

import triton
import triton.language as tl

from .tiles import encode, magnitude_bits

# States in 8 bits, in blocks of elements that share a scale. The formulas are those of
# csrc/math/state8.h. SIGNED is a constexpr: exp_avg is, exp_avg_sq is not.
ELEMENTS = tl.constexpr(256)  # of a block
PER_BLOCK = tl.constexpr(3)  # the array of random bits that the elements of a block share


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Four words from a counter of four (uint32, their shapes broadcast) and seed (int64)."""
    k0 = seed.to(tl.uint32)
    k1 = (seed.to(tl.int64) >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        # 64-bit products: one instruction for both words
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random16(start, key, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """16 random bits, as uint32 [BLOCK], of each element from `start` (a multiple of 8) on.

    key: seed (int64), step (uint32), index of the param (int32). STREAM: which array of the param.
    Eight adjacent elements share one evaluation, and use its words from the low half of the first
    word on.
    """
    seed, step, index = key
    eighth = start // 8 + tl.arange(0, BLOCK // 8)
    zeros = tl.zeros((BLOCK // 8,), tl.uint32)
    low, high = eighth.to(tl.uint32), (eighth >> 32).to(tl.uint32)
    which = index.to(tl.uint32) + (STREAM << 30)
    w0, w1, w2, w3 = philox(low, high, zeros + step, zeros + which, seed)
    # A join adds a last dimension of 2: here (word // 2), then (word % 2), then the half.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,))


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
