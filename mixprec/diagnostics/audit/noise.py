"""The errors of an op against FP32, and those that rounding to its formats explains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ...formats import E4M3, E5M2, Format
from ...ops._reference.block_formats import BlockFormat
from ..stats.measure import squares
from . import exact, what_if
from .lost import Lost, Operand
from .ops import Arguments, Listed, arguments
from .shadow import Ran, Shadow
from .values import FLOATS, is_float, widened

_LARGEST = {E4M3.dtype: E4M3.max, E5M2.dtype: E5M2.max}
# A rounding is off by up to half a unit in the last place, evenly: by 12^-1/2 of it in the mean.
_VARIANCE = 1 / 12
_ACCUMULATED = 2.0**-48  # of a sum in FP32, squared


def measured(
    func: Any,
    listed: Listed,
    args: Any,
    kwargs: Any,
    result: Any,
    ran: Ran,
    shadow: Shadow,
) -> Lost | None:
    """What one call has lost."""
    given = arguments(func, args, kwargs)
    actual = _results(func, given, result)
    if actual and actual[0].dtype.itemsize == 1:
        return None  # norm_quantize: what its codes lose is of the product that reads them
    lost = Lost()
    halves = [
        (i, *squares(own, widened(t)))
        for i, (t, own) in enumerate(zip(actual, ran.own, strict=False))
        if own is not None and is_float(t) and own.shape == t.shape and t.numel()
    ]
    if not halves:
        return None
    # Results differ in size, as the gradients of weights and inputs do: the one that lost most.
    i, signal, noise = max(halves, key=lambda half: float(half[2] / half[1].clamp(min=1e-300)))
    lost.own_signal, lost.own_noise = float(signal), float(noise)
    whole = ran.whole[i]
    if whole is not None:
        total = squares(whole, widened(actual[i]))
        lost.total_signal, lost.total_noise = float(total[0]), float(total[1])
    _operands(lost, func, listed, given, shadow)
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    has_casts = any(shadow.before.packed(t) is not None for t in inputs)
    _arithmetic(lost, listed, inputs, actual[i], ran, i, has_casts)
    if lost.product is not None and listed.kind == "product":
        a, b = (given[name] for name in listed.operands)
        if a.dim() == b.dim() == 2:
            roles = shadow.roles.get(a) or "x", shadow.roles.get(b) or "x"
            first, second = listed.operands
            a = shadow.own(a, lambda: _used(func, given, first))
            b_t = shadow.own(b, lambda: _used(func, given, second)).t()
            for name, recipe in shadow.what_if.items():
                lost.what_if[name] = what_if.product(recipe, roles, a, b_t)
    return lost


def _results(func: Any, given: Arguments, result: Any) -> list[torch.Tensor]:
    if func._schema.is_mutable and not func._schema.returns:  # gemm_accumulate_
        return [given["acc"]]
    found = result if isinstance(result, (tuple, list)) else [result]
    return [t for t in found if isinstance(t, torch.Tensor)]


def _used(func: Any, given: Arguments, name: str) -> torch.Tensor:
    """The values of an operand that the op computes with."""
    return exact.decoded(given, name) if func.namespace == "mixprec" else widened(given[name])


def _operands(lost: Lost, func: Any, listed: Listed, given: Arguments, shadow: Shadow) -> None:
    for name in listed.operands:
        t = given[name]
        if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or not t.numel():
            continue
        used, before, expected = _used(func, given, name), shadow.before.get(t), None
        if before is None:
            before = shadow.whole.get(t)
        elif (fmt := shadow.formats.get(t)) is not None:
            expected = _cast_noise(before, fmt, along=-2 if name == "b" else -1)
        largest = _LARGEST.get(t.dtype)
        saturated = None if largest is None else t.float().abs() == largest
        operand = lost.operands.setdefault(shadow.roles.get(t) or "x", Operand())
        operand.add(used, used if before is None else before, saturated, expected)


def _arithmetic(
    lost: Lost,
    listed: Listed,
    inputs: list[torch.Tensor],
    actual: torch.Tensor,
    ran: Ran,
    i: int,
    has_casts: bool,
) -> None:
    """The noise of the i-th result against FP32 of the operands as they are, and what explains it:
    its rounding, the sums, and what is rounded in between, which is taken to be as if the operands
    were rounded once more."""

    def as_cast(t: torch.Tensor, known: Any = None) -> torch.Tensor:
        return known() if known is not None else widened(t) if t.dtype in FLOATS else t

    want = ran.again(as_cast)[i] if has_casts else ran.own[i]
    assert want is not None
    got, finite = widened(actual), torch.isfinite(want)
    if bool((finite & ~torch.isfinite(got)).any()):
        lost.noise, lost.expected = math.inf, 1.0
        return
    want = torch.where(finite, want, 0.0)
    total, noise = map(float, squares(want, torch.where(finite, got, 0.0)))
    lost.noise = noise
    lost.expected = _rounding(actual.dtype, total, want.numel())
    if listed.kind == "product":
        lost.expected += max(t.shape[-1] for t in inputs if t.dim()) * _ACCUMULATED * total
        return
    generator = torch.Generator(want.device).manual_seed(0)
    narrow = [t.dtype for t in (*inputs, actual) if t.dtype in FLOATS]
    lowest = torch.finfo(min(narrow, key=lambda dtype: dtype.itemsize))

    def rounded(t: torch.Tensor, known: Any = None) -> torch.Tensor:
        if t.dtype not in FLOATS or t.dtype.itemsize > 4:
            return t
        wide = as_cast(t, known)
        away = torch.rand(wide.shape, generator=generator, device=wide.device) - 0.5
        return wide * (1 + lowest.eps * away) + lowest.smallest_normal * lowest.eps * away

    found = ran.again(rounded)[i]
    if found is not None:
        lost.expected += float(squares(want, torch.where(finite, found, 0.0))[1])


def _rounding(dtype: torch.dtype, square: float, numel: int, scale: float = 1.0) -> float:
    """The noise of numbers with this sum of squares that are rounded to dtype times scale."""
    info = torch.finfo(dtype)
    step = float(info.smallest_normal) * float(info.eps) * scale
    return _VARIANCE * (float(info.eps) ** 2 * square + numel * step**2)


def _cast_noise(x: torch.Tensor, fmt: Format | BlockFormat, along: int) -> float:
    """What a cast of x to a format may be off by; scales of block formats are those of blocks along
    this dimension."""
    square = x.double().square()
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if isinstance(fmt, BlockFormat):
        blocks = square.sqrt().transpose(along, -1).flatten(0, -2)
        blocks = functional.pad(blocks, (0, -blocks.shape[-1] % fmt.block))
        largest = blocks.unflatten(-1, (-1, fmt.block)).amax(-1)
        count = fmt.block
    else:
        largest, count = square.amax().sqrt(), x.numel()
    # A scale that is a power of two may be half of what would fit.
    scale = 2 * largest / element.max if element.bits <= 8 else torch.ones_like(largest)
    steps = (element.smallest_subnormal * scale).square().sum() * count
    return _VARIANCE * float(element.eps**2 * square.sum() + steps)
