"""pack and unpack: a tensor in 8, 4 or 2 bits by groups, with stochastic rounding."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .launch import FORMATS, MAX, on, soft_cast
from .launch import codes as as_codes
from .rounding import philox
from .tiles import ceil_div, decode, encode, is_nonfinite, load, store

GROUP = 128
GROUPS = 16  # per program


@triton.jit
def _without_subnormals(u, SIGN: tl.constexpr):
    """Bits, or for a subnormal number those of the next normal one, or 0, in this direction."""
    moved = tl.where(((u & 0x7FFFFFFF) == 0) | ((u >> 31) != SIGN), 0, (SIGN << 31) | 0x00800000)
    return tl.where((u & 0x7F800000) == 0, moved.to(tl.uint32), u)


@triton.jit
def _range(x, inside, LEVELS: tl.constexpr):
    """The minimum and the step, as bits of bf16 in uint32, of what is inside the rows of x."""
    s = x.to(tl.int32, bitcast=True)
    key = tl.where(s < 0, s ^ 0x7FFFFFFF, s)  # in the order of the numbers, NaN beyond Inf
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=1)
    high = tl.max(tl.where(inside, key, -0x7FFFFFFF), axis=1)
    low = tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.uint32, bitcast=True)
    high = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.uint32, bitcast=True)
    bad = is_nonfinite(low.to(tl.float32, bitcast=True))
    bad = bad | is_nonfinite(high.to(tl.float32, bitcast=True))
    low, high = _without_subnormals(low, 1), _without_subnormals(high, 0)
    down = (low + (low >> 31) * 0xFFFF) & 0xFFFF0000
    minimum = down.to(tl.float32, bitcast=True)
    maximum = high.to(tl.float32, bitcast=True)
    levels = tl.zeros_like(minimum) + LEVELS
    exact = tl.div_rn(maximum - minimum, levels).to(tl.uint32, bitcast=True)
    step = (exact + 0xFFFF) & 0xFFFF0000
    step = tl.where(step > 0x15800000, step, 0x15800000).to(tl.uint32)  # 2^-84
    below = minimum + step.to(tl.float32, bitcast=True) * levels < maximum
    step = tl.where(below, step + 0x10000, step)
    step = tl.where(high == down, 0, step).to(tl.uint32)
    span = step.to(tl.float32, bitcast=True) * levels
    bad = bad | is_nonfinite(span) | is_nonfinite(minimum + span)
    down, step = tl.where(bad, 0x7FC00000, down), tl.where(bad, 0, step)
    return (down >> 16).to(tl.uint32), (step >> 16).to(tl.uint32), bad


@triton.jit
def _random(start, seed, counter, GROUPS: tl.constexpr):
    """A byte for each element from `start` on, and the fraction that its group shares."""
    CALLS: tl.constexpr = GROUPS * 8
    call = start // 16 + tl.arange(0, CALLS)
    zeros = tl.zeros((CALLS,), tl.uint32)
    third, fourth = zeros + counter.to(tl.uint32), zeros + (counter >> 32).to(tl.uint32)
    words = philox(call.to(tl.uint32), (call >> 32).to(tl.uint32), third, fourth, seed)
    w0, w1, w2, w3 = words
    all = tl.xor_sum(tl.reshape(w0 ^ w1 ^ w2 ^ w3, (GROUPS, 8)), axis=1)
    all = all ^ (all >> 16)
    shared = ((all ^ (all >> 8)) & 0xFF).to(tl.int32).to(tl.float32) * 0.00390625
    four = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [CALLS, word // 2, word % 2]
    halves = tl.join(four & 0xFFFF, four >> 16)
    bytes = tl.join(halves & 0xFF, halves >> 8)
    return tl.reshape(bytes, (GROUPS, 128)), shared


@triton.jit
def _pack_block(x_ptr, codes_ptr, ranges_ptr, start, n, seed, counter, X: tl.constexpr,
                BITS: tl.constexpr, SOFT_CAST: tl.constexpr, GROUPS: tl.constexpr,
                FULL: tl.constexpr):  # fmt: skip
    LEVELS: tl.constexpr = (1 << BITS) - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = GROUPS * 128 // PER_BYTE
    offsets = start + tl.arange(0, GROUPS * 128)
    inside = tl.reshape(offsets < n, (GROUPS, 128))
    x = tl.reshape(decode(load(x_ptr, offsets, n, FULL), X, SOFT_CAST), (GROUPS, 128))
    minimum, step, bad = _range(x, inside, LEVELS)
    group = start // 128 + tl.arange(0, GROUPS)
    ranges = minimum | (step << 16)
    store(ranges_ptr, group, ranges.to(tl.int32, bitcast=True), ceil_div(n, 128), FULL)

    random, shared = _random(start, seed, counter, GROUPS)
    low = (minimum << 16).to(tl.float32, bitcast=True)
    factor = tl.div_rn(tl.full((GROUPS,), 256.0, tl.float32),
                       (step << 16).to(tl.float32, bitcast=True))  # fmt: skip
    factor = tl.where(step == 0, 0.0, factor)
    steps = (tl.where(bad[:, None], 0.0, x - low[:, None]) * factor[:, None]) + shared[:, None]
    steps = tl.minimum(steps.to(tl.int32), LEVELS << 8)
    code = (steps.to(tl.uint32) + random) >> 8
    code = tl.where(inside & (bad == 0)[:, None], code, 0).to(tl.uint32)
    shifts = tl.arange(0, PER_BYTE).to(tl.uint32) * BITS
    bytes = tl.sum(tl.reshape(code, (BYTES, PER_BYTE)) << shifts[None, :], axis=1)
    out = start // PER_BYTE + tl.arange(0, BYTES)
    store(codes_ptr, out, bytes.to(tl.uint8), ceil_div(n, PER_BYTE), FULL)


@triton.jit(do_not_specialize=["seed", "counter"])
def pack_kernel(
    x_ptr,
    codes_ptr,
    ranges_ptr,  # int32: the minimum and, above it, the step
    n,
    seed: tl.int64,
    counter: tl.int64,
    offset_ptr,  # int64 [1], added to counter; or None
    X: tl.constexpr,
    BITS: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * (GROUPS * 128)
    if offset_ptr is not None:
        counter += tl.load(offset_ptr)
    if start + GROUPS * 128 <= n:
        _pack_block(x_ptr, codes_ptr, ranges_ptr, start, n, seed, counter, X, BITS, SOFT_CAST,
                    GROUPS, True)  # fmt: skip
    else:
        _pack_block(x_ptr, codes_ptr, ranges_ptr, start, n, seed, counter, X, BITS, SOFT_CAST,
                    GROUPS, False)  # fmt: skip


@triton.jit
def unpack_kernel(
    codes_ptr,
    ranges_ptr,  # as above
    y_ptr,
    n,
    largest,
    Y: tl.constexpr,
    BITS: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * (GROUPS * 128)
    full = start + GROUPS * 128 <= n
    for FULL in tl.static_range(2):
        if full == FULL:
            PER_BYTE: tl.constexpr = 8 // BITS
            BYTES: tl.constexpr = GROUPS * 128 // PER_BYTE
            at = start // PER_BYTE + tl.arange(0, BYTES)
            bytes = load(codes_ptr, at, ceil_div(n, PER_BYTE), FULL).to(tl.uint32)
            shifts = tl.arange(0, PER_BYTE).to(tl.uint32) * BITS
            code = (bytes[:, None] >> shifts[None, :]) & ((1 << BITS) - 1)
            code = tl.reshape(code, (GROUPS, 128)).to(tl.int32).to(tl.float32)
            group = start // 128 + tl.arange(0, GROUPS)
            ranges = load(ranges_ptr, group, ceil_div(n, 128), FULL).to(tl.uint32, bitcast=True)
            minimum = (ranges << 16).to(tl.float32, bitcast=True)
            step = (ranges & 0xFFFF0000).to(tl.float32, bitcast=True)
            y = minimum[:, None] + code * step[:, None]
            y = tl.where(y > largest, largest, y)  # NaN stays NaN
            y = tl.where(y < largest * -1.0, largest * -1.0, y)
            y = tl.reshape(y, (GROUPS * 128,))
            store(y_ptr, start + tl.arange(0, GROUPS * 128), encode(y, y, Y, SOFT_CAST), n, FULL)


def pack(
    x: torch.Tensor, bits: int, seed: int, counter: int, offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    n = x.numel()
    packed = torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=x.device)
    ranges = torch.empty((triton.cdiv(n, GROUP), 2), dtype=torch.bfloat16, device=x.device)
    if n:
        with on(x):
            pack_kernel[(triton.cdiv(n, GROUPS * GROUP),)](
                as_codes(x), packed, ranges.view(torch.int32), n, seed, counter,
                offset, X=FORMATS[x.dtype], BITS=bits, SOFT_CAST=soft_cast(x.device, x.dtype),
                GROUPS=GROUPS, enable_fp_fusion=False,
            )  # fmt: skip
    return packed, ranges


def unpack(
    codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    y = torch.empty(shape, dtype=dtype, device=codes.device)
    n = math.prod(shape)
    if n:
        with on(codes):
            unpack_kernel[(triton.cdiv(n, GROUPS * GROUP),)](
                codes.contiguous(), ranges.contiguous().view(torch.int32), as_codes(y), n,
                MAX[dtype], Y=FORMATS[dtype], BITS=bits, SOFT_CAST=soft_cast(y.device, dtype),
                GROUPS=GROUPS, enable_fp_fusion=False,
            )  # fmt: skip
    return y
