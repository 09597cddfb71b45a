"""Random bits of the updates: Philox4x32-10, a function of seed, step, param and element.

The same bits as csrc/math/philox.h has. Triton's own generator counts in another way. Source:
Parallel random numbers: as easy as 1, 2, 3 (Salmon et al., 2011).
"""

import triton
import triton.language as tl


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
