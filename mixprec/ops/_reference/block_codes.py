"""The codes of the elements of block formats and of E8M0 scales.

The reference of csrc/math/mx.h in plain torch, for any device.
"""

from __future__ import annotations

import math

import torch

from ...formats import Format


def _binade(fmt: Format) -> tuple[int, int]:
    """Bits of mantissa, and the exponent of the smallest normal number as the field of FP32."""
    return -int(math.log2(fmt.eps)), 127 + int(math.log2(fmt.smallest_normal))


def encode(y: torch.Tensor, fmt: Format, random: torch.Tensor | None) -> torch.Tensor:
    """The codes of y (fp32, no NaN), saturated: uint8, one a byte.

    Rounded to nearest, ties to even; or, with 16 random bits for each element, to one of the two
    neighbours, up with the probability of what is cut off, to 2^-16 of their distance.
    """
    mantissa, least = _binade(fmt)
    magnitude = y.abs().clamp(max=fmt.max)
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=least)
    unit = (254 + mantissa - exponent << 23).view(torch.float32)  # 1 / (distance of neighbours)
    steps = magnitude * unit  # exact
    if random is None:
        whole = torch.round(steps).to(torch.int32)
    else:
        whole = (steps * 65536).to(torch.int32) + random.to(torch.int32) >> 16
    code = whole + (exponent - least << mantissa)
    return (code | torch.signbit(y).to(torch.int32) << fmt.bits - 1).to(torch.uint8)


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The values of codes of fewer than 8 bits, uint8, one a byte, in FP32."""
    mantissa, least = _binade(fmt)
    half = 1 << fmt.bits - 1
    code = torch.arange(half, device=codes.device, dtype=torch.int32)
    exponent = (code >> mantissa).clamp(min=1)
    steps = code - (exponent - 1 << mantissa)
    positive = steps.float() * (exponent - 1 + (least - mantissa) << 23).view(torch.float32)
    return torch.cat([positive, -positive])[codes.long() & 2 * half - 1]


def join(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits two a byte, the first in the low half; 0 beside the last of an odd number."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return padded[..., ::2] | padded[..., 1::2] << 4


def split(data: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `join`."""
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return codes[..., :columns]


def e8m0(amax: torch.Tensor, fmt: Format, scale_mode: str) -> torch.Tensor:
    """X + 127 of the scale 2^X of blocks with these finite amaxes (fp32), as int32.

        floor   X = floor(log2(amax)) - E                 fmt.max = F * 2^E, F in [1, 2)
        ceil    X = ceil(log2(amax)) - E
        even    as floor, of amax rounded to the mantissa of fmt, ties away from 0
        rceil   X = ceil(log2(amax / fmt.max))

    and at least -127. By the bits of amax: what is added to them carries into the exponent.
    """
    mantissa, _ = _binade(fmt)
    largest = torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32).item()
    add = {
        "floor": 0,
        "ceil": 0x7FFFFF,
        "even": 1 << 22 - mantissa,
        "rceil": 0x7FFFFF - (int(largest) & 0x7FFFFF),
    }[scale_mode]
    exponent = (amax.view(torch.int32) + add >> 23) - (int(largest) >> 23) + 127
    return exponent.clamp(min=0)


def e8m0_value(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) in FP32; NaN of 255."""
    bits = code.to(torch.int32) << 23
    bits = torch.where(code == 0, 1 << 22, bits)  # subnormal
    return torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)
