"""Rounding FP32 to BF16: stochastic, or keeping the 16 bits that are cut off.

The reference of csrc/math/rounding.h in plain torch, for any device.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Streams: the array of a param that the random bits are for. They share one counter word with the
# index of the param, of which there are fewer than 2^30.
PARAM, FIRST_STATE, SECOND_STATE, BLOCK = range(4)
_STREAM_SHIFT = 30
MAX_INDEX = 2**_STREAM_SHIFT


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit words of a * b (a is split in halves: int64 cannot hold the product)."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], seed: int | torch.Tensor
) -> torch.Tensor:
    """Philox4x32-10 of counters in 32-bit words, as int64 [..., 4].

    key = (seed's low word, high word). Source: Parallel random numbers: as easy as 1, 2, 3
    (Salmon et al., 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def random_bits(
    shape: torch.Size, seed: int | torch.Tensor, step: torch.Tensor, index: int, stream: int
) -> torch.Tensor:
    """16 random bits per element as int64, for one array of param `index` at `step`.

    counter = (e // 8 low word, high word, step, index + stream * 2^30) for element e in row-major
    order, which takes the (e % 8)-th 16 bits of the result.
    """
    count = (shape.numel() + 7) // 8
    eighth = torch.arange(count, device=step.device)
    words = (
        eighth & _WORD,
        eighth >> 32,
        step.reshape(()).long().expand(count),
        torch.full_like(eighth, index + (stream << _STREAM_SHIFT)),
    )
    bits = philox(words, seed)
    halves = torch.stack([bits & 0xFFFF, bits >> 16], dim=-1)
    return halves.reshape(-1)[: shape.numel()].reshape(shape)


def fp32_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of an FP32 tensor as int64, from 0 on."""
    return x.view(torch.int32).long() & _WORD


def as_bf16(bits: torch.Tensor) -> torch.Tensor:
    """The BF16 tensor with these bits, the low 16 of integers."""
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def stochastic_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x (fp32) rounded to one of its two BF16 neighbours, up with probability `the part cut off`.

    Inf and NaN are unchanged.
    """
    rounded = as_bf16((fp32_bits(x) + bits) >> 16)
    return torch.where(torch.isfinite(x), rounded, x.to(torch.bfloat16))


def stochastic_24(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x (fp32) with 24 bits: the last 8 are cut off, and one unit of magnitude is added with
    probability `the part cut off`, by the lower 8 random bits.

    Inf and NaN are unchanged.
    """
    noisy = (fp32_bits(x) + (bits & 0xFF)) & ~0xFF
    return torch.where(torch.isfinite(x), noisy.to(torch.int32).view(torch.float32), x)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP32 tensor as BF16 (to nearest, ties away from zero) and the int16 difference in bits.

    To nearest even would lose one master in 65,536: a tie could be either neighbour's.
    """
    code = master.view(torch.int32)
    low = code.to(torch.int16)  # the low half, as a signed number
    high = ((code - low.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
    nan = torch.isnan(master)
    return torch.where(nan, master.to(torch.bfloat16), high), low.masked_fill(nan, 0)


def remainder_of(
    master: torch.Tensor, param: torch.Tensor, dtype: torch.dtype = torch.int16
) -> torch.Tensor:
    """The remainder with which `param`, which is `master` rounded to nearest even, joins to
    `master`, in int8 to the nearest number of 24 bits; 0 where it is another number. A tie that was
    rounded down is one unit too large for it."""
    low = master.view(torch.int32) - (param.view(torch.int16).to(torch.int32) << 16)
    same = (master.to(param.dtype) == param) & master.isfinite()
    low = torch.where(same, low.clamp(-(2**15), 2**15 - 1), 0).to(torch.int16)
    return low if dtype == torch.int16 else upper_half(low)


def upper_half(remainder: torch.Tensor) -> torch.Tensor:
    """A remainder of 16 bits to the nearest of 8, of which the largest is 127 / 256 of a unit."""
    return ((remainder.to(torch.int32) + 128) >> 8).clamp(max=127).to(torch.int8)


def lower_half(remainder: torch.Tensor) -> torch.Tensor:
    """A remainder of 8 bits as one of 16: the same number."""
    return remainder.to(torch.int16) * 256


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 tensor of which split_master made `param` and `remainder`: int16, or the upper 8 of
    these bits as int8.

    A param that other code set to zero stays zero: no smaller magnitude could be subtracted from.
    """
    low = remainder.to(torch.int32) * (1 if remainder.dtype == torch.int16 else 256)
    low = torch.where((param == 0) & (low < 0), 0, low)
    return ((param.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def export_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """`join_master`, but a number halfway between two BF16 neighbours is returned one FP32 unit
    further from 0, so that rounding to nearest even gives `param`."""
    tie = (remainder == torch.iinfo(remainder.dtype).min).to(torch.int32)
    return (join_master(param, remainder).view(torch.int32) + tie).view(torch.float32)


_SHIFT = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
_Q = [
    float.fromhex(x)
    for x in ["0x1.6d4328p-10", "0x1.120b74p-7", "0x1.5554eap-5", "0x1.5554dcp-3", "0x1p-1"]
]


def exp_fp32(x: torch.Tensor) -> torch.Tensor:
    """e^x of an FP32 tensor; NaN stays."""
    t = torch.where(x > 89.0, 89.0, x)
    t = torch.where(t < -104.0, -104.0, t)
    n = t * 1.44269504 + _SHIFT
    whole = n.view(torch.int32) - 0x4B400000
    n = n - _SHIFT
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    q = torch.full_like(r, _Q[0])
    for coefficient in _Q[1:]:
        q = q * r + coefficient
    y = (q * (r * r) + r) + 1.0
    half = whole >> 1
    for power in (half, whole - half):
        y = y * ((power + 127) << 23).view(torch.float32)
    return torch.where(torch.isnan(x), x, y)
