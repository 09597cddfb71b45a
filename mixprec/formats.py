"""The low-precision number formats and their limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BF16", "BLOCK", "E2M1", "E2M3", "E3M2", "E4M3", "E5M2"]
__all__ += ["FORMATS", "FP16", "Format", "parse"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `max` is the largest finite value, `smallest_normal` and `smallest_subnormal` the smallest
    positive ones, `eps` the spacing of the values just above 1. Sources: IEEE 754-2019 (FP16);
    OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling Formats (MX)
    Specification 1.0 (E2M1, E3M2, E2M3, which have neither Inf nor NaN).
    """

    name: str
    dtype: torch.dtype
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_inf: bool

    @property
    def saturates(self) -> bool:
        """Whether a cast of a finite value that is too large gives `max` (8 bits and fewer) or Inf
        (16 bits)."""
        return self.bits <= 8

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", torch.float8_e4m3fn, 8, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, False)
E5M2 = Format("e5m2", torch.float8_e5m2, 8, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, True)
FP16 = Format("fp16", torch.float16, 16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True)
BF16 = Format(
    "bf16", torch.bfloat16, 16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, True
)
E2M1 = Format("e2m1", torch.uint8, 4, 6.0, 1.0, 0.5, 0.5, False)
E3M2 = Format("e3m2", torch.uint8, 6, 28.0, 0.25, 0.0625, 0.25, False)
E2M3 = Format("e2m3", torch.uint8, 6, 7.5, 1.0, 0.125, 0.125, False)

FORMATS: tuple[Format, ...] = (E4M3, E5M2, FP16, BF16)
# Elements of block formats only. Their codes are uint8, two in a byte for E2M1.
BLOCK: tuple[Format, ...] = (E2M1, E3M2, E2M3)
_BY_NAME: dict[object, Format] = {name: f for f in (*FORMATS, *BLOCK) for name in (f, f.name)}
_BY_NAME |= {name: f for f in FORMATS for name in (f.dtype, str(f.dtype).removeprefix("torch."))}
_BY_NAME["half"] = FP16


def parse(fmt: Format | str | torch.dtype, *, who: str = "parse") -> Format:
    """Return the Format that `fmt` names: a Format, a name such as "e4m3", or a torch dtype.

    Raises ValueError, listing what is valid, for anything else.
    """
    key = fmt.lower() if isinstance(fmt, str) else fmt
    try:
        return _BY_NAME[key]
    except (KeyError, TypeError):
        names = ", ".join(f"{f.name} ({f.dtype})" for f in FORMATS)
        raise ValueError(f"{who}: fmt must be one of {names}, got {fmt!r}") from None
