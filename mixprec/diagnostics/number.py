"""`python -m mixprec formats NUMBER`: what a number becomes in each format, with its bits."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import torch

from ..formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, Format
from ..ops import dequantize, quantize
from .writers import aligned

_BLOCKS = (("mxfp8", E4M3), ("mxfp8", E5M2), ("mxfp6", E2M3), ("mxfp6", E3M2), ("mxfp4", E2M1))


class Cast(NamedTuple):
    """A row of the table. bits: sign, exponent and mantissa. below and above: the neighbours of
    value; "" for NaN and in a block, whose numbers depend on its scale."""

    format: str
    bits: str
    value: float
    below: float | str
    above: float | str
    scale: str


def _bits(code: int, fmt: Format) -> str:
    mantissa = 1 - math.frexp(fmt.eps)[1]
    digits, split = f"{code:0{fmt.bits}b}", fmt.bits - mantissa
    return f"{digits[0]} {digits[1:split]} {digits[split:]}"


def _decoded(code: int, fmt: Format) -> float:
    """The number of a code of 8 or 16 bits."""
    kind = torch.uint8 if fmt.bits == 8 else torch.uint16
    return float(torch.tensor([code], dtype=kind).view(fmt.dtype).float())


def plain(x: float, fmt: Format) -> Cast:
    """x in a format of 8 or 16 bits, without a scale."""
    data = quantize(torch.tensor([x]), fmt, scale=1.0).data
    code = int(data.view(torch.uint8 if fmt.bits == 8 else torch.uint16)[0])
    value, sign = float(data.float()), 1 << (fmt.bits - 1)
    size = code & (sign - 1)
    if value != value:
        return Cast(fmt.name, _bits(code, fmt), value, "", "", "")
    is_largest = abs(value) in (fmt.max if fmt.saturates else float("inf"), float("inf"))
    outward = abs(value) if is_largest else _decoded(size + 1, fmt)
    inward = _decoded(size - 1, fmt) if size else -fmt.smallest_subnormal
    below, above = (-outward, -inward) if code & sign else (inward, outward)
    return Cast(fmt.name, _bits(code, fmt), value, below, above, "")


def in_block(name: str, fmt: Format, x: float, block: float, tensor: float) -> Cast:
    """x in a block of the format whose largest magnitude is `block`; `tensor`: that of all."""
    nvfp4 = name == "nvfp4"
    size = 16 if nvfp4 else 32
    rows = torch.zeros(2, size)
    rows[0, :2], rows[1, 0] = torch.tensor([x, block]), torch.tensor(tensor)
    q = quantize(rows, fmt, granularity="nvfp4" if nvfp4 else "mx")
    code, exponent = (int(t.view(torch.uint8).flatten()[0]) for t in (q.data, q.scale_inv))
    scale = f"2^{exponent - 127}" if exponent < 255 else "nan"
    if q.tensor_scale_inv is not None:
        scale = f"{_decoded(exponent, E4M3):g} x {float(q.tensor_scale_inv):.6g}"
    bits, value = (
        _bits(code & ((1 << fmt.bits) - 1), fmt),
        float(dequantize(q, torch.float32)[0, 0]),
    )
    return Cast(f"{name}, {fmt}", bits, value, "", "", scale)


def casts(x: float, block: float | None = None, tensor: float | None = None) -> list[Cast]:
    """x in every format."""
    given = torch.tensor([x, block or 0.0, tensor or 0.0]).abs()
    largest, largest_of_all = float(given[:2].amax()), float(given.amax())  # NaN stays
    rows = [plain(x, fmt) for fmt in (BF16, FP16, E5M2, E4M3)]
    return rows + [
        in_block(*one, x, largest, largest_of_all) for one in (*_BLOCKS, ("nvfp4", E2M1))
    ]


def table(x: float, rows: list[Cast]) -> str:
    """The casts of x as text."""
    lines = [["format", "sign, exponent, mantissa", "value", "off by", "below", "above", "scale"]]
    for row in rows:
        off = abs(row.value - x) / abs(x) if x else 0.0
        lost = f"{float(f'{100 * off:.2g}'):g} %" if off < float("inf") else ""
        numbers = [f"{v:.8g}" if isinstance(v, float) else v for v in row[3:]]
        lines.append([row.format, row.bits, f"{row.value:.8g}", lost, *numbers])
    return "\n".join(aligned(lines, left=(0, 1)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mixprec formats",
        description="A number, rounded to FP32 first, in every format, with its bits.",
    )
    parser.add_argument("number", type=float)
    parser.add_argument("--block", type=float, help="the largest number of its block")
    parser.add_argument("--tensor", type=float, help="the largest number of its tensor (nvfp4)")
    # To argparse -1e9 is an option, but nothing with a space is one.
    words = [
        f" {word}" if word[:1] == "-" and word[1:2] not in "-h" else word
        for word in arguments or ()
    ]
    given = parser.parse_args(words)
    x = float(torch.tensor(given.number))
    print(table(x, casts(x, given.block, given.tensor)))
    return 0
