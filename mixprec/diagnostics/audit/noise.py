"""The errors of an op against FP32, and those that rounding to its formats explains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ...formats import Format
from ...ops._reference.block_formats import BlockFormat
from ...recipes import GEMMS, Recipe
from . import residual, rules, what_if
from .lost import RESULT, ROLES_OF, Lost, Operand, power, product
from .ops import Arguments, Listed, arguments
from .shadow import Ran, Shadow
from .values import FLOATS, is_float, widened

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward
_GRADIENTS = {0: "grad_input", 1: "grad_weight"}  # of a convolution's, by the place of the result
# A rounding is off by up to half a unit in the last place, evenly: by 12^-1/2 of it in the mean.
_VARIANCE = 1 / 12
_FLUSHED = torch.finfo(torch.float32).smallest_normal
_ACCUMULATED = 2.0**-48  # of a sum in FP32, squared


def measured(
    func: Any,
    listed: Listed,
    args: Any,
    kwargs: Any,
    result: Any,
    ran: Ran,
    shadow: Shadow,
) -> dict[str, Lost]:
    """What one call has lost, by what it computes, as `Op.lost` has it."""
    given = arguments(func, args, kwargs)
    actual = _results(func, given, result)
    if actual and actual[0] is not None and actual[0].dtype.itemsize == 1:
        return {}  # norm_quantize: what its codes lose is of the product that reads them
    powers = [
        (i, power(own), power(own - t))
        for i, (t, own) in enumerate(zip(actual, ran.own, strict=False))
        if t is not None and own is not None and is_float(t) and own.shape == t.shape and t.numel()
    ]
    if not powers:
        return {}
    used = _Used(func, given)
    operands = _operands(used, listed, given, shadow)
    if func.overloadpacket is _CONVOLUTION_BACKWARD:
        chosen = {_GRADIENTS[one[0]]: one for one in powers if one[0] in _GRADIENTS}
    else:  # results differ in size, as the gradients of q, k and v do: the one that lost most
        name = product(operands) if listed.kind in ("product", "convolution") else None
        chosen = {name or RESULT: max(powers, key=lambda one: one[2] / max(one[1], 1e-300))}
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    has_casts = any(shadow.before.packed(t) is not None for t in inputs)
    found = {}
    for name, (i, signal, noise) in chosen.items():
        lost, one, whole = Lost(signal, noise), actual[i], ran.whole[i]
        assert one is not None
        if whole is ran.own[i]:
            lost.total_signal, lost.total_noise = signal, noise
        elif whole is not None:
            lost.total_signal, lost.total_noise = power(whole), power(whole - one)
        lost.operands = {
            role: operand
            for role, operand in operands.items()
            if name == RESULT or role in ROLES_OF[name]
        }
        if not (has_casts and _is_estimated(lost, func, given, one, used)):
            _arithmetic(lost, listed, inputs, one, ran, i, used if has_casts else None)
        if listed.kind == "product" and name != RESULT:
            lost.what_if = _what_if(listed, given, used, shadow)
        elif listed.kind == "convolution":
            lost.what_if = _what_if_convolved(given, ran, i, shadow)
        found[name] = lost
    return found


def _what_if(
    listed: Listed, given: Arguments, used: _Used, shadow: Shadow
) -> dict[str, tuple[float, float]]:
    if not shadow.what_if or len(listed.operands) != 2:
        return {}
    first, second = listed.operands
    a, b = given[first], given[second]
    if not a.dim() == b.dim() == 2:
        return {}
    roles = shadow.roles.get(a) or "x", shadow.roles.get(b) or "x"
    wide = shadow.own(a, lambda: used[first]), shadow.own(b, lambda: used[second]).t()
    return {name: what_if.product(recipe, roles, *wide) for name, recipe in shadow.what_if.items()}


def _what_if_convolved(
    given: Arguments, ran: Ran, i: int, shadow: Shadow
) -> dict[str, tuple[float, float]]:
    found, own = {}, ran.own[i]
    assert own is not None
    kind = "forward" if "grad_output" not in given else GEMMS[1 + i]
    for name, whole in shadow.what_if.items():
        recipe = whole.product(kind)

        def value(t: torch.Tensor, known: Any = None, recipe: Recipe = recipe) -> torch.Tensor:
            if t is given.get("bias") or t.dim() < 3:
                return shadow.own(t)
            role = shadow.roles.get(t) or "x"
            wide = shadow.own(t)
            weight, transposed = given["weight"], bool(given.get("transposed"))
            seen = what_if.of_convolution(recipe, role, wide, weight, transposed)
            return seen.to(wide.dtype)

        got = ran.again(value)[i]
        if got is not None:
            found[name] = power(own), power(own - got)
    return found


class _Used(dict[str, torch.Tensor]):
    """The values of the operands that an op computes with, by name."""

    def __init__(self, func: Any, given: Arguments) -> None:
        super().__init__()
        self._has_scales, self._given = func.namespace == "mixprec", given

    def __missing__(self, name: str) -> torch.Tensor:
        t = self._given[name]
        self[name] = rules.decoded(self._given, name) if self._has_scales else widened(t)
        return self[name]

    def of(self, t: torch.Tensor) -> torch.Tensor:
        name = next((name for name, given in self._given.items() if given is t), None)
        return t if t.dtype not in FLOATS else widened(t) if name is None else self[name]


def _results(func: Any, given: Arguments, result: Any) -> list[torch.Tensor | None]:
    if func._schema.is_mutable and not func._schema.returns:  # gemm_accumulate_
        return [given["acc"]]
    found = result if isinstance(result, (tuple, list)) else [result]
    return [t if isinstance(t, torch.Tensor) else None for t in found]


def _operands(used: _Used, listed: Listed, given: Arguments, shadow: Shadow) -> dict[str, Operand]:
    found: dict[str, Operand] = {}
    for name in listed.operands:
        t = given[name]
        if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or not t.numel():
            continue
        before, square, expected = shadow.before.get(t), 0.0, None
        if before is None:
            before = shadow.whole.get(t)
        elif (fmt := shadow.formats.get(t)) is not None:
            square = power(before)
            expected = _cast_noise(before, square, fmt, along=-2 if name == "b" else -1)
        operand = found.setdefault(shadow.roles.get(t) or "x", Operand())
        before = used[name] if before is None else before
        operand.add(used[name], before, square, expected, t if t.dtype.itemsize == 1 else None)
    return found


def _is_estimated(
    lost: Lost, func: Any, given: Arguments, actual: torch.Tensor, used: _Used
) -> bool:
    """Of a large product of two matrices, the noise against FP32 of the operands as they are, by a
    few sums over all of its elements; False: of another op, or where something is not finite."""
    names = residual.operands(func, given)
    if names is None:
        return False
    a, b = used[names[0]], used[names[1]]
    bias = None if names[2] is None else used[names[2]]
    total, noise = power(actual), residual.noise(actual, a, b, bias)
    if not math.isfinite(noise):
        return False
    lost.noise = noise
    lost.expected = _rounding(actual.dtype, total, actual.numel())
    lost.expected += _summing(a.shape[1] + b.shape[1], total, actual.numel())
    return True


def _summing(terms: int, square: float, numel: int) -> float:
    """The noise of sums of so many terms in FP32 with this sum of squares."""
    return terms * (_ACCUMULATED * square + numel * _FLUSHED**2)


def _arithmetic(
    lost: Lost,
    listed: Listed,
    inputs: list[torch.Tensor],
    actual: torch.Tensor,
    ran: Ran,
    i: int,
    used: _Used | None,
) -> None:
    """The noise of the i-th result against FP32 of the operands as they are, and what explains it:
    its rounding, the sums, and what is rounded in between, which is taken to be as if the operands
    were rounded once more."""

    def as_cast(t: torch.Tensor, known: Any = None) -> torch.Tensor:
        return (
            widened(t) if used is None and t.dtype in FLOATS else t if used is None else used.of(t)
        )

    want = ran.own[i] if used is None else ran.again(as_cast)[i]
    assert want is not None
    total, lost.noise = power(want), power(want - actual)
    finite = None
    if not math.isfinite(lost.noise):
        finite = torch.isfinite(want)
        if bool((finite & ~torch.isfinite(actual)).any()):
            lost.noise, lost.expected = math.inf, 1.0
            return
        want = torch.where(finite, want, 0.0)
        total, lost.noise = power(want), power(want - torch.where(finite, actual, 0.0))
    lost.expected = _rounding(actual.dtype, total, want.numel())
    if listed.kind == "product":
        lost.expected += _summing(max(t.shape[-1] for t in inputs if t.dim()), total, want.numel())
    if len(listed.operands) > 2 and listed.kind == "product":
        lost.noise = lost.expected = 0.0  # a sum of products of three: torch says not in what
        return
    if listed.kind == "product" or lost.noise <= lost.expected:
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
        lost.expected += power(want - (found if finite is None else torch.where(finite, found, 0)))


def _rounding(dtype: torch.dtype, square: float, numel: int, scale: float = 1.0) -> float:
    """The noise of numbers with this sum of squares that are rounded to dtype times scale."""
    info = torch.finfo(dtype)
    # A processor may flush what is below FP32's normal range.
    flushes = info.smallest_normal == _FLUSHED
    step = float(info.smallest_normal) * (1.0 if flushes else float(info.eps)) * scale
    return _VARIANCE * (float(info.eps) ** 2 * square + numel * step**2)


def _cast_noise(x: torch.Tensor, square: float, fmt: Format | BlockFormat, along: int) -> float:
    """What a cast of x, whose sum of squares this is, to a format may be off by; scales of block
    formats are those of blocks along this dimension."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    if isinstance(fmt, BlockFormat):
        blocks = x.abs().transpose(along, -1).flatten(0, -2)
        blocks = functional.pad(blocks, (0, -blocks.shape[-1] % fmt.block))
        largest = power(blocks.unflatten(-1, (-1, fmt.block)).amax(-1)) * fmt.block
    else:
        largest = float(x.abs().amax()) ** 2 * x.numel()
    # A scale that is a power of two may be half of what would fit.
    scale = (2 / element.max) ** 2 * largest if element.bits <= 8 else float(x.numel())
    return _VARIANCE * (element.eps**2 * square + element.smallest_subnormal**2 * scale)
