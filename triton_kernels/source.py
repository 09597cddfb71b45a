"""What the casting kernels cast, a tensor or FP32 values that a fused op computes from some, and
where the results go: two tuples of pointers, which are arguments of a kernel."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .activations import activation
from .launch import FORMATS, MAX, codes, codes_in_order, soft_cast
from .tiles import decode


class Source(NamedTuple):
    """x, or what `values` computes from it. None: not given."""

    x: Any  # [M, K]
    X: Any  # a format, as W, B and G: constexprs
    blocks: Any  # constexpr: how many there are of values, 2 for the gradients of x and up
    act: Any = None  # constexpr: the activation of x
    up: Any = None  # [M, K], of x's format: the other half of a gate
    g: Any = None  # [M, K]: the values are the gradients of x and of up
    G: Any = None
    mean: Any = None  # [M], or None for RMSNorm
    rstd: Any = None  # [M]: the norm of x
    weight: Any = None  # [K]
    W: Any = None
    bias: Any = None  # [K]
    B: Any = None

    def size(self) -> tuple[int, int]:
        """M and K."""
        shape = self.x.shape
        return (shape[:-1].numel(), shape[-1]) if len(shape) else (1, 1)

    def is_plain(self) -> bool:
        """Whether values are those of x. To compute them takes registers."""
        return self.act is None and self.rstd is None

    def warps(self, of_plain: int) -> int:
        """Of a program with as many elements."""
        return of_plain if self.is_plain() else 2 * of_plain


def source_of(x: torch.Tensor, **others: Any) -> Source:
    """Of tensors, which are made contiguous, and the name of an activation."""
    both = others.get("g") is not None and others.get("up") is not None
    fields: dict[str, Any] = {"blocks": tl.constexpr(1 + both)}
    for name, value in ({"x": x} | others).items():
        fields[name] = codes_in_order(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and name in ("x", "g", "weight", "bias"):
            fields[name[0].upper()] = tl.constexpr(FORMATS[value.dtype])
    if "act" in fields:
        fields["act"] = tl.constexpr(fields["act"])
    return Source(**fields)


class Target(NamedTuple):
    """What values are cast to. All but fmt_max are constexprs."""

    fmt_max: Any
    Q: Any  # a format
    POWER_OF_TWO: Any
    SOFT_CAST: Any


@cache
def _target(dtype: torch.dtype, power_of_two: bool, soft: bool) -> Target:
    constants = map(tl.constexpr, (FORMATS[dtype], power_of_two, soft))
    return Target(MAX[dtype], *constants)


def target_of(source: Source, cast: Any) -> Target:
    soft = soft_cast(source.x.device, source.x.dtype, cast.dtype)
    return _target(cast.dtype, cast.power_of_two_scale, soft)


class Result(NamedTuple):
    """Of one block of values. None: not wanted, or not given."""

    data: Any = None  # [M, K]
    data_t: Any = None  # [K, M]
    scale: Any = None  # []: the one to use
    scale_inv: Any = None
    scale_inv_t: Any = None
    amax: Any = None  # [] int32 bits, initially 0
    record: Any = None  # [] int32 bits: raised to it, which is then no result
    row_amax: Any = None  # [M], likewise
    column_amax: Any = None  # [K], likewise


TILE = 128  # of the scales by blocks


def to_cast(
    source: Source,
    cast: Any,
    scale: torch.Tensor | None = None,
    record: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], Result]:
    """The results of a cast, allocated, and the same as an argument of a kernel. amax: that of the
    values, if it is known."""
    (M, K), by, device = source.size(), cast.granularity, source.x.device
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}

    def scales_of(lines: int, length: int) -> torch.Tensor:
        if by == "tensor":
            return torch.empty((), **fp32)
        rows = triton.cdiv(lines, TILE) if by == "block128x128" else lines
        return torch.empty((rows, 1 if by == "row" else triton.cdiv(length, TILE)), **fp32)

    data = torch.empty(source.x.shape, dtype=cast.dtype, device=device)
    scale_inv = scales_of(M, K)
    data_t, scale_inv_t = data.new_empty((0, 0)), torch.empty((0,), **fp32)
    result = Result(codes(data), scale=scale, scale_inv=scale_inv)
    if cast.transpose:
        data_t = data.new_empty((K, M))
        result = result._replace(data_t=codes(data_t))
        if by != "tensor":
            scale_inv_t = scales_of(K, M)
            result = result._replace(scale_inv_t=scale_inv_t)
    if cast.transpose and by == "row":
        # Both maxima begin at multiples of 16 bytes, whatever M is: one binary for all.
        columns_at = 4 + M + -M % 4
        maxima = torch.zeros(columns_at + K, dtype=torch.int32, device=device)
        bits, rows, columns = maxima[0], maxima[4 : 4 + M], maxima[columns_at:]
        result = result._replace(row_amax=rows, column_amax=columns)
    elif amax is None:
        bits = torch.zeros((), dtype=torch.int32, device=device)
    else:
        bits = amax.view(torch.int32)
    result = result._replace(amax=bits)
    largest = bits.view(torch.float32)
    if record is not None:
        result, largest = result._replace(record=record.view(torch.int32)), largest.new_empty((0,))
    return (data, data_t, scale_inv, scale_inv_t, largest), result


@triton.jit
def _load(ptr, offsets, inside, FULL: tl.constexpr):
    if FULL:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=inside, other=0)


@triton.jit
def norm_values(x, mean, rstd, source, column, K, SOFT_CAST: tl.constexpr):
    """((x - mean) * rstd) * weight + bias"""
    y = (x - mean) * rstd
    inside = column < K
    if source.weight is not None:
        weight = tl.load(source.weight + column, mask=inside, other=0)
        y = y * decode(weight, source.W, SOFT_CAST)
    if source.bias is not None:
        y = y + decode(tl.load(source.bias + column, mask=inside, other=0), source.B, SOFT_CAST)
    return y


@triton.jit
def values(source, row, column, M, K, FULL: tl.constexpr, SOFT_CAST: tl.constexpr):
    """The values at [row, column] of [M, K], in FP32, 0 beyond: a tuple of one block, or of those
    of dx and dup. No row: at `column` of all K elements. No M: no row is beyond. FULL: nothing."""
    offsets, inside = column, column < K
    if row is not None:
        offsets = row * K + column
    if M is not None:
        inside = (row < M) & inside
    x = decode(_load(source.x, offsets, inside, FULL), source.X, SOFT_CAST)
    if source.rstd is not None:
        if M is not None:
            row = tl.minimum(row, M - 1)
        mean = tl.zeros((), tl.float32)
        if source.mean is not None:
            mean = tl.load(source.mean + row)
        y = norm_values(x, mean, tl.load(source.rstd + row), source, column, K, SOFT_CAST)
        return (tl.where(inside, y, 0.0),)
    elif source.act is None:
        return (x,)
    else:
        y, slope = activation(x, source.act)
        if source.g is None:
            if source.up is not None:
                y = y * decode(_load(source.up, offsets, inside, FULL), source.X, SOFT_CAST)
            return (y,)
        else:
            g = decode(_load(source.g, offsets, inside, FULL), source.G, SOFT_CAST)
            if source.up is None:
                return (g * slope,)
            else:
                up = decode(_load(source.up, offsets, inside, FULL), source.X, SOFT_CAST)
                return (g * up) * slope, g * y
