"""What the ops that cast share: their checks, the shapes of their results, and Quantized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...formats import FORMATS, Format, parse
from ...quantized import Quantized
from .._reference import scale_layout
from . import checks

# data, data_t, scale_inv, scale_inv_t, amax
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# In the schema of an op whose functions take a `Cast`.
SCHEMA = (
    "ScalarType dtype, Tensor? scale, bool transpose, str granularity, bool power_of_two_scale, "
    "Tensor(a!)? record=None"
)


class Cast(NamedTuple):
    """How an op casts what it computes: the arguments of `quantize` without those of block formats.

    Ops that compute what they cast also take a dtype of float32, which leaves the values as they
    are, and, for FP8, granularity "mx", whose scales are uint8 codes. record, for "tensor" only:
    fp32 [], raised to the amax, with NaN above all; the amax is then no result, [0].
    """

    dtype: torch.dtype
    scale: torch.Tensor | None = None
    transpose: bool = False
    granularity: str = "tensor"
    power_of_two_scale: bool = True
    record: torch.Tensor | None = None


def check(
    op: str, x: torch.Tensor, cast: Cast, allowed: Iterable[str] = scale_layout.GRANULARITIES
) -> None:
    """The arguments of a cast of values of x's shape."""
    dtype, scale, transpose, granularity, _, record = cast
    scale_layout.check(op, granularity, allowed)
    if granularity != "tensor" and dtype not in checks.FP8:
        raise ValueError(f'{op}: granularity must be "tensor" for {dtype}, got {granularity!r}')
    for name, given in (("scale", scale), ("record", record)):
        if given is None:
            continue
        checks.is_scalar(op, name, given, torch.float32, x)
        if granularity != "tensor":
            raise ValueError(
                f"{op}: {name} must be None with granularity {granularity!r}, whose scales come "
                f"from x"
            )
    if transpose and x.dim() < 2:
        raise ValueError(f"{op}: transpose needs x of 2 or more dimensions, got {tuple(x.shape)}")


def check_fused(op: str, x: torch.Tensor, cast: Cast) -> None:
    """As `check`, for an op that may also leave its values in FP32, or cast them to MX."""
    if cast.dtype != torch.float32:
        parse(cast.dtype, who=op)
    elif cast.scale is not None or cast.transpose:
        raise ValueError(f"{op}: scale must be None and transpose False for float32")
    check(op, x, cast, scale_layout.FUSED)


def fused(
    op: str,
    x: torch.Tensor,
    fmt: Format | str | torch.dtype,
    scale: float | torch.Tensor | None,
    transpose: bool,
    granularity: str,
    power_of_two_scale: bool,
) -> tuple[Format, Cast]:
    """The format and the cast that a fused op is asked for; ValueError for what only `quantize`
    has."""
    parsed = parse(fmt, who=op)
    if parsed not in FORMATS:
        names = ", ".join(map(str, FORMATS))
        raise ValueError(f"{op}: fmt must be one of {names}, got {parsed}")
    if granularity == "mx" and power_of_two_scale is not True:
        raise ValueError(
            f'{op}: power_of_two_scale must be left out with granularity "mx", whose scales are '
            f"powers of two, got {power_of_two_scale!r}"
        )
    checks.is_tensor(op, "x", x)
    given = checks.positive_scale(op, "scale", scale, x.device, or_zero=True)
    return parsed, Cast(parsed.dtype, given, transpose, granularity, power_of_two_scale)


def fake(x: torch.Tensor, cast: Cast) -> Results:
    dtype, _, transpose, granularity, _, record = cast
    m, k = scale_layout.as_matrix(x.shape)
    shape_t = scale_layout.scale_shape(granularity, k, m)
    if not transpose or granularity == "tensor":
        shape_t = (0,)

    scales = torch.uint8 if granularity == "mx" else torch.float32
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((k, m) if transpose else (0, 0), dtype=dtype),
        x.new_empty(scale_layout.scale_shape(granularity, m, k), dtype=scales),
        x.new_empty(shape_t, dtype=scales),
        x.new_empty(() if record is None else (0,), dtype=torch.float32),
    )


def quantized(
    results: tuple[torch.Tensor, ...], fmt: Format, transpose: bool, granularity: str
) -> Quantized:
    """The first five results of an op, those that were not asked for as None."""
    data, data_t, scale_inv, scale_inv_t, amax = results[:5]
    own_scales = transpose and granularity != "tensor"
    return Quantized(
        data,
        scale_inv,
        amax,
        data_t if transpose else None,
        scale_inv_t if own_scales else None,
        fmt,
        granularity,
        columns=scale_layout.as_matrix(data.shape)[1] if granularity == "mx" else None,
    )
