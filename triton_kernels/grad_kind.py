"""Counts the Inf, NaN, zero and subnormal elements of a gradient.

The rule of csrc/math/unscale.h, judged by the bits of fp32 (fp64 for fp64): they order as the
magnitudes do, with Inf above all numbers and NaN above Inf.
"""

import triton
import triton.language as tl

from .tiles import magnitude_bits


@triton.jit
def kinds(raw, unscaled, offsets, n, G: tl.constexpr, FULL: tl.constexpr):
    """One element's counts in the four bytes of an uint32, to be added up to 255 times.

    From the lowest: Inf and NaN, before or after unscaling; zero and subnormal in the format G,
    before. Elements beyond n are not counted.
    """
    if G == "fp64":
        INF: tl.constexpr = 0x7FF0000000000000
        MIN_NORMAL: tl.constexpr = 0x0010000000000000
        before = raw.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        after = unscaled.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        INF: tl.constexpr = 0x7F800000
        if G == "fp16":
            MIN_NORMAL: tl.constexpr = 0x38800000
        else:
            MIN_NORMAL: tl.constexpr = 0x00800000
        before = magnitude_bits(raw)
        after = magnitude_bits(unscaled)
    larger = tl.where(before > after, before, after)
    kind = tl.where(larger == INF, 1, 0) + tl.where(larger > INF, 1 << 8, 0)
    kind += tl.where(before == 0, 1 << 16, 0)
    kind += tl.where((before > 0) & (before < MIN_NORMAL), 1 << 24, 0)
    if not FULL:
        kind = tl.where(offsets < n, kind, 0)
    return kind.to(tl.uint32, bitcast=True)


@triton.jit
def add_counts(counts_ptr, sums):
    """counts_ptr[0:4] += the four bytes of sums, added over its elements. Integers: the order in
    which the programs get here does not matter. Most have nothing to add but zeros."""
    for k in tl.static_range(4):
        count = tl.sum(((sums >> (8 * k)) & 0xFF).to(tl.int32), axis=0).to(tl.int64)
        tl.atomic_add(counts_ptr + k, count, mask=count != 0, sem="relaxed")
