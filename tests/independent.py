"""The numeric rules computed a second time, for comparison: NumPy and Python integers only.

Nothing here calls an op or a torch cast; torch tensors are only opened as bits. Formats are value
tables made from their definition, a cast is a search in such a table, sums are FP64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

F32 = np.float32


@dataclass(frozen=True)
class Spec:
    """A format by its definition: widths, bias, and the codes where finite values end."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    inf_code: int | None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nan_code(self) -> int:
        """The NaN that stands for all of them in comparisons: every magnitude bit set."""
        return self.sign_bit - 1

    @property
    def code_type(self) -> type[np.unsignedinteger]:
        return np.uint8 if self.bits <= 8 else np.uint16

    @property
    def max(self) -> float:
        return float(decode_table(self)[self.max_code])


E4M3 = Spec("e4m3", torch.float8_e4m3fn, 4, 3, 7, 0x7E, None)
E5M2 = Spec("e5m2", torch.float8_e5m2, 5, 2, 15, 0x7B, 0x7C)
FP16 = Spec("fp16", torch.float16, 5, 10, 15, 0x7BFF, 0x7C00)
BF16 = Spec("bf16", torch.bfloat16, 8, 7, 127, 0x7F7F, 0x7F80)
SPECS = (E4M3, E5M2, FP16, BF16)
# Elements of block formats only; every code is a number.
E2M1 = Spec("e2m1", torch.uint8, 2, 1, 1, 0x7, None)
E3M2 = Spec("e3m2", torch.uint8, 3, 2, 3, 0x1F, None)
E2M3 = Spec("e2m3", torch.uint8, 2, 3, 1, 0x1F, None)
SMALL_SPECS = (E2M1, E3M2, E2M3)
BY_DTYPE = {spec.dtype: spec for spec in SPECS}


@cache
def decode_table(spec: Spec) -> np.ndarray:
    """The FP64 value of every code: (-1)^s * 2^(e - bias) * 1.m, subnormal where e = 0."""
    table = np.empty(1 << spec.bits)
    ones = 1 << spec.mantissa_bits
    for code in range(spec.sign_bit):
        e, m = divmod(code, ones)
        if code == spec.inf_code:
            value = math.inf
        elif code > spec.max_code:
            value = math.nan
        elif e == 0:
            value = math.ldexp(m, 1 - spec.bias - spec.mantissa_bits)
        else:
            value = math.ldexp(ones + m, e - spec.bias - spec.mantissa_bits)
        table[code] = value
        table[code | spec.sign_bit] = -value
    return table


@cache
def midpoints(spec: Spec) -> np.ndarray:
    """The ties: entry i lies halfway between codes i and i + 1, exact in FP64 and in FP32.

    The last one is the overflow threshold: halfway from max to the value that would follow it.
    """
    finite = decode_table(spec)[: spec.max_code + 1]
    above = 2 * finite[-1] - finite[-2]
    return (finite + np.append(finite[1:], above)) / 2


def encode(values: np.ndarray, spec: Spec, *, saturate: bool | None = None) -> np.ndarray:
    """FP64 values to codes: nearest, ties to the even code; saturating by default up to 8 bits.

    Non-finite values keep their class; Inf is NaN where the format has no Inf.
    """
    values = np.asarray(values, dtype=np.float64)
    saturate = spec.bits <= 8 if saturate is None else saturate
    ties = midpoints(spec)
    magnitude = np.abs(values)
    code = np.searchsorted(ties, magnitude, side="left")
    at_tie = (code < len(ties)) & (ties[np.minimum(code, len(ties) - 1)] == magnitude)
    code = code + (at_tie & (code % 2 == 1))
    if saturate:
        code = np.where(np.isfinite(values), np.minimum(code, spec.max_code), code)
    infinity = spec.nan_code if spec.inf_code is None else spec.inf_code
    code = np.where(code > spec.max_code, infinity, code)
    code = np.where(np.isnan(values), spec.nan_code, code)
    return (code | np.where(np.signbit(values), spec.sign_bit, 0)).astype(spec.code_type)


def same_nan(codes: np.ndarray, spec: Spec) -> np.ndarray:
    """Codes with every NaN replaced by one of them: any NaN equals any NaN."""
    last = spec.max_code if spec.inf_code is None else spec.inf_code
    nan = (codes & spec.nan_code) > last
    return np.where(nan, spec.nan_code, codes).astype(spec.code_type)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> np.ndarray:
    """The bit patterns of a tensor of any float dtype and strides, unsigned, in its shape."""
    raw = t.detach().contiguous().view(-1).view(_BITS[t.element_size()]).numpy()
    return raw.view(f"uint{8 * t.element_size()}").reshape(tuple(t.shape))


def values(t: torch.Tensor) -> np.ndarray:
    """The exact FP64 values of a tensor, decoded here."""
    if t.dtype in BY_DTYPE:
        return decode_table(BY_DTYPE[t.dtype])[bits(t)]
    real = bits(t).view(np.float64 if t.dtype == torch.float64 else F32)
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        return real.astype(np.float64)


def narrow(exact: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits of FP64 values after one IEEE rounding to `dtype`."""
    exact = np.asarray(exact, dtype=np.float64)
    if dtype in BY_DTYPE:
        return encode(exact, BY_DTYPE[dtype], saturate=False)
    if dtype == torch.float64:
        return exact.view(np.uint64)
    with np.errstate(over="ignore"):
        return exact.astype(F32).view(np.uint32)


def canonical(pattern: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bit patterns of `dtype` with every NaN made the same."""
    if dtype in BY_DTYPE:
        return same_nan(pattern, BY_DTYPE[dtype])
    if not dtype.is_floating_point:
        return pattern
    real = pattern.view(np.float64 if dtype == torch.float64 else F32)
    return np.where(np.isnan(real), np.full_like(real, np.nan), real).view(pattern.dtype)


def assert_bits(got: torch.Tensor, want: np.ndarray, what: str = "result") -> None:
    """`got` holds exactly the bit patterns `want` (any NaN equal to any NaN, -0 not to +0)."""
    assert tuple(got.shape) == want.shape, f"{what}: shape {tuple(got.shape)}, not {want.shape}"
    have, need = canonical(bits(got), got.dtype), canonical(want, got.dtype)
    if not np.array_equal(have, need):
        wrong = np.argwhere(np.atleast_1d(have != need))
        first = tuple(int(i) for i in wrong[0])
        have, need = np.atleast_1d(have)[first], np.atleast_1d(need)[first]
        raise AssertionError(
            f"{what}: {len(wrong)} of {want.size} {got.dtype} differ, "
            f"first at {first}: got {int(have):#x}, expected {int(need):#x}"
        )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """Two tensors agree in dtype and in every bit (any NaN equal to any NaN)."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert_bits(got, bits(want), what)


def cast(x: torch.Tensor, scale: float, spec: Spec) -> np.ndarray:
    """The codes of cast(x * scale): the product rounded to FP32, then one rounding to `spec`."""
    wide = values(x)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (wide.astype(F32) * F32(scale)).astype(np.float64)
    if spec.bits == 8:  # a finite x saturates also where the product overflowed
        overflowed = np.isinf(product) & np.isfinite(wide)
        product = np.where(overflowed, np.copysign(spec.max, wide), product)
    return encode(product, spec)


def amax(x: torch.Tensor) -> float:
    magnitude = np.abs(values(x)).ravel()
    if np.isnan(magnitude).any():
        return math.nan
    return float(max(magnitude.tolist(), default=0.0))


def scale_of(
    amax: float, fmt_max: float, margin: int = 0, power_of_two: bool = True, previous: float = 1.0
) -> float:
    """fmt_max / amax * 2^-margin, rounded once to FP32, rounded down to a power of two, clamped."""
    if not (0 < amax < math.inf):
        return previous
    with np.errstate(over="ignore", under="ignore"):
        scale = float(F32(fmt_max) / F32(amax))
        scale = float(F32(scale * 2.0**-margin))
    if power_of_two and 0 < scale < math.inf:
        scale = math.ldexp(1.0, math.frexp(scale)[1] - 1)
    return min(max(scale, 2.0**-126), 2.0**126)


def philox(counter: Sequence[int], seed: int) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    c, k, word = list(counter), [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & word, a >> 32 ^ c[3] ^ k[1], a & word]
        k = [k[0] + 0x9E3779B9 & word, k[1] + 0xBB67AE85 & word]
    return c


def random16(count: int, seed: int, step: int, index: int, stream: int) -> np.ndarray:
    """The 16 random bits of elements 0 to count - 1 of one array of a param, as the docs say."""
    bits = []
    for e in range(0, count, 8):
        words = philox([e // 8 & 0xFFFFFFFF, e // 8 >> 32, step, index + (stream << 30)], seed)
        bits += [half for w in words for half in (w & 0xFFFF, w >> 16)]
    return np.array(bits[:count], dtype=np.uint32)


def assert_same_lists(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(g, w), f"number {i}, {tuple(g.shape)}"
