"""An optimizer state in 8 bits: blocks of 256 elements that share a scale.

The reference of csrc/math/state8.h in plain torch, for any device. A code is a floating-point
number whose fraction has 4 bits in the upper half of the codes and 3 below; code 0 is 0:

                sign   4 bits of fraction   3 bits of fraction
    signed      1 bit  2^-3 to 1.9375       1.125 * 2^-11 to 2^-3
    unsigned           2^-7 to 1.9375       1.125 * 2^-23 to 2^-7   for exp_avg_sq

x = value(code) * scale. The scale is the least power of two with |x| <= 1.9375 * scale in the
block, so that decoding is exact, decoded values are BF16 numbers, and encoding them again gives the
same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256
_TOP = 0x7FF  # the first 12 bits of 1.9375, the largest value
_INF = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_MIN_SCALE = (127 - 100) << 23  # 2^-100: the smallest value of a block is a normal number
_MAX_SCALE = (127 + 126) << 23  # 2^126, whose inverse is a normal number
_SIGNED_LOW = 119304648.0  # 2^16 / (1.125 * 2^-11) in fp32


@dataclass(frozen=True)
class Codes:
    """The codes of a magnitude, as bits of fp32 numbers."""

    half: int  # of them have 4 bits of fraction: the upper half
    middle: int  # the value of code `half`

    @property
    def upper(self) -> int:  # code + upper: the first 12 bits
        return _TOP - (2 * self.half - 1)

    @property
    def lower(self) -> int:  # code + lower: the first 11 bits
        return (self.middle >> 20) - self.half


SIGNED = Codes(64, (127 - 3) << 23)
UNSIGNED = Codes(128, (127 - 7) << 23)


def blocks(numel: int) -> int:
    """The number of scales of a state."""
    return (numel + BLOCK - 1) // BLOCK


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """x in row-major order as [blocks, 256], padded with zeros."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def decode(codes: torch.Tensor, scale: torch.Tensor, kind: Codes) -> torch.Tensor:
    """The fp32 values of `codes` (uint8, any shape) with `scale` (fp32 [blocks])."""
    code = _in_blocks(codes).int()
    c = code & (2 * kind.half - 1)
    bits = torch.minimum(c + kind.upper, 2 * (c + kind.lower)) << 19
    value = _float(torch.where(c == 0, 0, bits)) * scale[:, None]
    value = torch.where(code != c, -value, value)
    return value.reshape(-1)[: codes.numel()].view(codes.shape)


def encode(
    x: torch.Tensor, kind: Codes, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, x's shape) and scales (fp32 [blocks]) of x (fp32).

    random: 16 random bits per element [blocks, 256], for stochastic rounding; None: to nearest.

    A positive unsigned value below the smallest code is rounded up to it: as 0 under the square
    root it would make an update huge. A block that holds Inf, NaN or more than 1.9375 * 2^126 is
    NaN when it is decoded.
    """
    bits = _in_blocks(x.float()).view(torch.int32)
    magnitude = bits & _MAGNITUDE
    largest = magnitude.amax(dim=1, keepdim=True).clamp(max=_INF)  # as integers, NaN > Inf
    scale = ((largest + 0x7FFFF) & _INF).clamp(min=_MIN_SCALE)
    scale = torch.where(scale > _MAX_SCALE, _INF, scale)
    y = _float(magnitude) * _float(torch.where(scale == _INF, 0, (254 << 23) - scale))
    u = y.view(torch.int32)
    # The code times 2^16. The bits count in steps of 2^-3 of a power of two below `middle`, and of
    # 2^-4 above it.
    position = ((u + u.clamp(min=kind.middle)) >> 4) - kind.upper * 2**16
    low = u  # between 0 and code 1: code 1
    if kind is SIGNED:  # linear
        low = (y * _SIGNED_LOW).nan_to_num(0.0).int()
    position = torch.maximum(position, low.clamp(max=2**16))
    code = (position + (2**15 if random is None else random.int())) >> 16
    if kind is SIGNED:
        code = torch.where(bits < 0, code | 128, code)
    code = torch.where(scale == _INF, 0, code)
    codes = code.to(torch.uint8).reshape(-1)[: x.numel()].view(x.shape)
    return codes, _float(scale).view(-1)
