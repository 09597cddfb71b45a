"""The block formats: blocks of small elements along K that share a scale in one byte."""

from __future__ import annotations

from typing import NamedTuple

from ... import formats

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
