"""What the tensor cores of NVIDIA's GPUs compute: one step of a sum of products, in exact integers.

The formula is that of csrc/math/tensor_core.h, which says where it is from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._dispatch import checks
from . import gemm_scales


class TensorCore(NamedTuple):
    """fraction_bits: below the exponent of the largest addend; terms: products that a step adds;
    min_exponent: of the largest addend; significant_bits: of the result; promoted: whether our
    kernels add the sum of each 128 of K to an FP32 register."""

    fraction_bits: int
    terms: int
    min_exponent: int
    significant_bits: int
    promoted: bool = False


_F16, _BF16, _FP8 = (torch.float16,), (torch.bfloat16,), checks.FP8
_WIDE = TensorCore(25, 16, -133, 24)
_TABLE: dict[str, dict[tuple[torch.dtype, ...], TensorCore]] = {
    "v100": {_F16: TensorCore(23, 4, -131, 24)},
    "a100": {_F16 + _BF16: TensorCore(24, 8, -132, 24)},
    "ada": {
        _F16 + _BF16: TensorCore(24, 8, -132, 24),
        _FP8: TensorCore(13, 16, -132, 14, promoted=True),
    },
    "hopper": {_F16 + _BF16: _WIDE, _FP8: TensorCore(13, 32, -133, 14, promoted=True)},
    "blackwell": {_F16 + _BF16: _WIDE, _FP8: _WIDE._replace(terms=32)},
}
ARCHITECTURES = tuple(_TABLE)
# The exponent of the smallest normal number; that of a subnormal number, too.
_MIN_EXPONENT = {
    torch.float8_e4m3fn: -6,
    torch.float8_e5m2: -14,
    torch.float16: -14,
    torch.bfloat16: -126,
}
_NONE = -(1 << 20)  # the exponent of a product that is 0
_NAN = 0x7FFFFFFF


def tensor_core(arch: str, dtype: torch.dtype) -> TensorCore | None:
    """That of an architecture for operands of `dtype`; None if it has none."""
    for dtypes, core in _TABLE[arch].items():
        if dtype in dtypes:
            return core
    return None


def formats(arch: str) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtypes in _TABLE[arch] for dtype in dtypes)


def _parts(x: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed significands and exponents of fp32 x: x = significand * 2^(exponent - 23), where the
    exponent is `least` or more. Exact for finite numbers of a format whose smallest exponent is
    `least`."""
    bits = x.view(torch.int32).long() & 0x7FFFFFFF
    exponent = (bits >> 23).clamp(min=1) - 127
    significand = bits & 0x7FFFFF | (bits >= 1 << 23).long() << 23
    significand = significand >> (least - exponent).clamp(0, 63)
    return torch.where(x.signbit(), -significand, significand), exponent.clamp(min=least)


def _cut(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x * 2^-shift, toward zero."""
    kept = x.abs() >> shift.clamp(0, 63)
    return torch.where(x < 0, -kept, kept)


def step(
    core: TensorCore,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> torch.Tensor:
    """c + the sum over the last dimension of a * b, as one step of the tensor core computes it.

    a, b: fp32 [..., terms or fewer], broadcast to each other, values of `dtypes`; c: fp32 [...].
    """
    fraction = core.fraction_bits
    (ma, ea), (mb, eb) = (_parts(x, _MIN_EXPONENT[d]) for x, d in zip((a, b), dtypes, strict=True))
    mc, ec = _parts(c, -126)
    products, exponents = ma * mb, ea + eb
    top = torch.where(products != 0, exponents, _NONE).amax(-1)
    top = torch.maximum(top, torch.where(mc != 0, ec, _NONE)).clamp(min=core.min_exponent)
    total = _cut(products, 46 - fraction + top[..., None] - exponents).sum(-1)
    total = total + _cut(mc << max(fraction - 23, 0), max(23 - fraction, 0) + top - ec)
    unit = top - fraction
    length = torch.frexp(total.abs().double()).exponent.long()
    # No more bits than the result has, and none below the smallest FP32 number.
    drop = torch.maximum(length - core.significant_bits, -149 - unit).clamp(0, 63)
    kept = torch.where(total < 0, -(total.abs() >> drop << drop), total.abs() >> drop << drop)
    y = torch.ldexp(kept.double(), unit).float()
    # What Inf and NaN give. 0 * Inf is NaN, and the sum of Inf and -Inf.
    special = ((a.double() * b.double()).sum(-1) + c.double()).float()
    usual = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1) & torch.isfinite(c)
    y = torch.where(usual, y, special)
    nan = torch.full_like(y, _NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.isnan(y), nan, y)


def product(operands: gemm_scales.Operands, fast_accum: bool, arch: str) -> torch.Tensor:
    """`gemm_scales.product` by chained steps along K."""
    core = tensor_core(arch, operands.a.dtype)
    assert core is not None

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c = torch.zeros((x.shape[0], y.shape[1]), dtype=torch.float32, device=x.device)
        left, right = x.float()[:, None], y.float().t()[None]
        for start in range(0, x.shape[1], core.terms):
            part = slice(start, start + core.terms)
            c = step(core, left[..., part], right[..., part], c, (x.dtype, y.dtype))
        return c

    promoted = core.promoted and not fast_accum
    return gemm_scales.product(operands, multiply=multiply, promoted=promoted)
