"""The block formats: blocks of small elements along K that share a scale in one byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from ... import formats
from ...formats import Format

# How the exponent of an MX scale follows from the amax of its block.
SCALE_MODES = ("floor", "ceil", "even", "rceil")
DEFAULT_SCALE_MODE = "rceil"
GRANULARITIES = ("mx", "nvfp4")
# A scale without a sign, as wide as E5M3 may be; 255 is NaN.
UE5M3 = Format("ue5m3", torch.uint8, 9, 114688.0, 2.0**-14, 2.0**-17, 2.0**-3, False)


@dataclass(frozen=True)
class BlockFormat:
    """How a matrix is cast. `rows` x `block` elements share a scale: E8M0, or with nvfp4 `scale`
    beside an FP32 scale for each part of `outer`: "tensor", "row", "block1x128", or None.

    name: how it is stored, for `dequantize_mx`. bound: the largest scale of a block. factor: by
    which scales are larger than those that make the largest element 6. nearest: scales are
    Transformer Engine's, to nearest also where elements are rounded at random. adaptive: "mae" or
    "mse", by which error a block has the better of the scales that make its largest element 6 or 4.
    eden: the random numbers are for the scales, corrected so that the product of x and its cast,
    over each 128, is that of x and x.

    As text: a name of `BLOCK_FORMATS` and, after slashes, some of `_PARTS`.

    Sources: OCP Microscaling Formats (MX) Specification 1.0 (2023); Pretraining Large Language
    Models with NVFP4 (NVIDIA, 2025); Four Over Six (Cook et al., 2025) for adaptive; Quartet II
    (Panferov et al., 2026) for eden; TetraJet-v2 (2025) for "1x128".
    """

    name: str
    element: Format
    block: int
    nvfp4: bool
    outer: str | None = None
    rows: int = 1
    scale: Format = formats.E4M3
    nearest: bool = False
    adaptive: str = ""
    bound: float = 448.0
    factor: float = 1.0
    eden: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.scale.dtype if self.nvfp4 else torch.uint8

    @property
    def casts_transpose(self) -> bool:
        """Whether the transpose has the FP32 scale of the matrix, or neither has one."""
        return self.outer in (None, "tensor")


_MX = ("mxfp8_e4m3", formats.E4M3), ("mxfp8_e5m2", formats.E5M2), ("mxfp6_e3m2", formats.E3M2)
BLOCK_FORMATS = {
    name: BlockFormat(name, element, 32, False)
    for name, element in (*_MX, ("mxfp6_e2m3", formats.E2M3), ("mxfp4", formats.E2M1))
} | {"nvfp4": BlockFormat("nvfp4", formats.E2M1, 16, True, "tensor")}
_PARTS: dict[str, dict[str, Any]] = {
    "32x32": {"rows": 32},
    "16x16": {"rows": 16},
    "row": {"outer": "row"},
    "1x128": {"outer": "block1x128"},
    "ue5m3": {"outer": None, "scale": UE5M3, "name": "nvfp4/ue5m3"},
    "nearest": {"nearest": True},
    "mae": {"adaptive": "mae"},
    "mse": {"adaptive": "mse"},
    "max256": {"bound": 256.0},
    "x1.0625": {"factor": 17 / 16},
    "eden": {"eden": True, "bound": 255.99, "factor": 0.93 * 17 / 16},
}
_parsed = dict(BLOCK_FORMATS)


def parse(op: str, fmt: str) -> BlockFormat:
    """The block format of that text; ValueError listing what there is for another."""
    if isinstance(fmt, str) and fmt in _parsed:
        return _parsed[fmt]
    name, *parts = str(fmt).split("/")
    base = BLOCK_FORMATS.get(name)
    if base is None or not {*parts} <= {*_PARTS}:
        raise ValueError(
            f"{op}: fmt must be one of {', '.join(BLOCK_FORMATS)}, and after slashes some of "
            f"{', '.join(_PARTS)}, got {fmt!r}"
        )
    settings = [_PARTS[part] for part in parts]
    block = replace(base, **{key: value for one in settings for key, value in one.items()})
    different = sum(map(len, settings)) == len({key for one in settings for key in one})
    fits = block.rows in (1, block.block) and (base.nvfp4 or {*parts} <= {"32x32"})
    alone = [block.rows > 1, not block.casts_transpose, block.scale != formats.E4M3, block.eden]
    # 4/6 chooses among scales of a bound and of no other factor; UE5M3 has no bound.
    free = not block.adaptive or (block.factor == 1 and not block.eden)
    free &= block.scale == formats.E4M3 or (block.bound == 448 and not block.adaptive)
    if not different or not fits or sum(alone) > 1 or not free:
        raise ValueError(f"{op}: fmt must have parts that go together, got {fmt!r}")
    if not torch.compiler.is_compiling():
        _parsed[fmt] = block
    return block


def name_of(fmt: formats.Format, granularity: str) -> str | None:
    """The text of elements `fmt` with that granularity, "mx" or "nvfp4" and what follows after a
    slash; None if there is none."""
    kind, slash, rest = granularity.partition("/")
    for name, block in BLOCK_FORMATS.items():
        if block.element == fmt and kind == ("nvfp4" if block.nvfp4 else "mx"):
            return name + slash + rest
    return None


def per_byte(name: str) -> int:
    """Elements in a byte of codes."""
    return 2 if parse("quantize_mx", name).element.bits == 4 else 1


def sizes(name: str, columns: int) -> tuple[int, int]:
    """The bytes of codes and the number of scales of a row of `columns` elements."""
    block = parse("quantize_mx", name).block
    return -(-columns // per_byte(name)), -(-columns // block)


def scales(
    block: BlockFormat, scale_inv: torch.Tensor, tensor_scale_inv: torch.Tensor | None
) -> torch.Tensor:
    """The values of the scales of blocks [M, blocks], times the FP32 ones if they are given."""
    if not block.nvfp4:
        return e8m0_value(scale_inv)
    if block.scale == UE5M3:
        return torch.where(scale_inv == 255, math.nan, decode(scale_inv, UE5M3))
    if tensor_scale_inv is None:
        return scale_inv.float()
    return scale_inv.float() * by_blocks(tensor_scale_inv, scale_inv.shape[1])


def by_blocks(outer: torch.Tensor, across: int) -> torch.Tensor:
    """One for each of so many blocks of 16 of a row, of FP32 scales of one element, [M, 1] or
    [M, ceil(K / 128)]."""
    if outer.numel() == 1:
        return outer.reshape(())
    return outer if outer.shape[1] == 1 else outer.repeat_interleave(8, 1)[:, :across]


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
_SIGNS = 0x2D9A  # bit i: whether element i of 16 changes its sign; 8 of 16 do, in no pattern


def hadamard(x: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """x [R, C] @ Q for each `size` columns of x, FP32 [R, C rounded up to it]; missing columns are
    0. size: a power of two from 16 to 128.

    Q = diag(signs) H / sqrt(size), where H is Hadamard's matrix of +-1 in Sylvester's order and
    signs are constants. Q Q^T = I, so hadamard(a) @ hadamard(b)^T = a @ b^T but for roundings. H
    takes a few rounds of sums and differences in FP32, in a fixed order: the same bits on every
    device, inside of torch.autocast and with TF32 allowed.

    Source: Training LLMs with MXFP4 (Tseng et al., 2025).
    """
    rows, columns = x.shape
    x = pad(x.float(), (0, -columns % size))
    ones = torch.ones(size, dtype=torch.int64, device=x.device)
    i = ones.cumsum(0) - 1
    signs = (1 - 2 * ((ones * _SIGNS >> i % BLOCK ^ ones * _SIGNS >> i // BLOCK) & 1)).float()
    y = x.reshape(rows, x.shape[1] // size, size) * signs
    # Elements half of the size apart become neighbours; in the last round all have met.
    for _ in range(size.bit_length() - 1):
        low, high = y[..., : size // 2], y[..., size // 2 :]
        y = torch.stack((low + high, low - high), dim=-1).flatten(-2)
    return (y * size**-0.5).reshape(x.shape)
