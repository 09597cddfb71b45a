"""The block formats: blocks of small elements along K that share a scale in one byte."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ... import formats
from ...formats import Format

# How the exponent of an MX scale follows from the amax of its block.
SCALE_MODES = ("floor", "ceil", "even", "rceil")
DEFAULT_SCALE_MODE = "rceil"


class BlockFormat(NamedTuple):
    """`block` elements share a scale: E8M0, or with nvfp4 E4M3 beside an FP32 scale of the tensor.

    Sources: OCP Microscaling Formats (MX) Specification 1.0 (2023); Pretraining Large Language
    Models with NVFP4 (NVIDIA, 2025).
    """

    element: formats.Format
    block: int
    nvfp4: bool


BLOCK_FORMATS = {
    "mxfp8_e4m3": BlockFormat(formats.E4M3, 32, False),
    "mxfp8_e5m2": BlockFormat(formats.E5M2, 32, False),
    "mxfp6_e3m2": BlockFormat(formats.E3M2, 32, False),
    "mxfp6_e2m3": BlockFormat(formats.E2M3, 32, False),
    "mxfp4": BlockFormat(formats.E2M1, 32, False),
    "nvfp4": BlockFormat(formats.E2M1, 16, True),
}


def parse(op: str, fmt: str) -> BlockFormat:
    """The block format of that name; ValueError listing the names for an unknown one."""
    found = BLOCK_FORMATS.get(fmt) if isinstance(fmt, str) else None
    if found is None:
        raise ValueError(f"{op}: fmt must be one of {', '.join(BLOCK_FORMATS)}, got {fmt!r}")
    return found


def name_of(fmt: formats.Format, granularity: str) -> str | None:
    """The block format of elements `fmt` with that granularity, "mx" or "nvfp4"; None if none."""
    for name, block in BLOCK_FORMATS.items():
        if block.element == fmt and granularity == ("nvfp4" if block.nvfp4 else "mx"):
            return name
    return None


def per_byte(name: str) -> int:
    """Elements in a byte of codes."""
    return 2 if BLOCK_FORMATS[name].element.bits == 4 else 1


def sizes(name: str, columns: int) -> tuple[int, int]:
    """The bytes of codes and the number of scales of a row of `columns` elements."""
    block = BLOCK_FORMATS[name].block
    return -(-columns // per_byte(name)), -(-columns // block)


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


BLOCK = 16
_SIGNS = 0x2D9A  # bit i: whether element i of a block changes its sign; 8 of 16 do, in no pattern


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [R, C] @ Q for each 16 columns of x, FP32 [R, C rounded up to 16]; missing columns are 0.

    Q = diag(signs) H / 4, where H is Hadamard's matrix of +-1 in Sylvester's order and signs are
    constants. Q Q^T = I, so hadamard(a) @ hadamard(b)^T = a @ b^T but for roundings. H takes four
    rounds of sums and differences in FP32, in a fixed order: the same bits on every device, inside
    of torch.autocast and with TF32 allowed.

    Source: Training LLMs with MXFP4 (Tseng et al., 2025).
    """
    rows, columns = x.shape
    x = pad(x.float(), (0, -columns % BLOCK))
    ones = torch.ones(BLOCK, dtype=torch.int64, device=x.device)
    signs = (1 - 2 * (ones * _SIGNS >> ones.cumsum(0) - 1 & 1)).float()
    y = x.reshape(rows, x.shape[1] // BLOCK, BLOCK) * signs
    for _ in range(4):  # elements 8 apart become neighbours, in 4 rounds all have met
        low, high = y[..., : BLOCK // 2], y[..., BLOCK // 2 :]
        y = torch.stack((low + high, low - high), dim=-1).flatten(-2)
    return (y * 0.25).reshape(x.shape)
