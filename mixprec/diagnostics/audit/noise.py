"""The errors of an op against FP32, and those that rounding to its formats explains.

The noise of a large product is estimated, without computing it again: of E = C - A @ B and S [N, s]
of random signs, the mean of ||C @ S - A @ (B @ S)||^2 / s is ||E||^2 (Hutchinson, 1989; Freivalds'
check of a product, 1977), off by sqrt(2 / s) of it at most, at s (1 / M + 1 / N + 1 / K) of the
product's cost. Every element of C counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from ...formats import Format
from ...ops._reference.block_formats import BlockFormat
from ...ops.gemm import gemm_op, gemm_simulated_op
from ...recipes import GEMMS, Recipe
from ..measure import cast, product, squares
from . import reference
from .ops import Call, ours
from .records import RESULT, ROLES_OF, Lost, Operand, power, product_of
from .reference import FLOATS, is_float, widened
from .shadow import Ran, Shadow

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward
_GRADIENTS = {0: "grad_input", 1: "grad_weight"}  # of a convolution's, by the place of the result
# A rounding is off by up to half a unit in the last place, evenly: by 12^-1/2 of it in the mean.
_VARIANCE = 1 / 12
_FLUSHED = torch.finfo(torch.float32).smallest_normal
_ACCUMULATED = 2.0**-48  # of a sum in FP32, squared
_SIGNS = 32
_LARGE = 8 * _SIGNS  # from here on it is cheaper than the product
aten = torch.ops.aten


def measured(call: Call, ran: Ran, shadow: Shadow) -> dict[str, Lost]:
    """What one call of a listed op has lost, by what it computes, as `Op.lost` has it."""
    assert call.listed is not None
    kind, actual = call.listed.kind, _results(call)
    if actual and actual[0] is not None and actual[0].dtype.itemsize == 1:
        return {}  # norm_quantize: what its codes lose is of the product that reads them
    powers = [
        (i, power(exact), power(exact - t))
        for i, (t, exact) in enumerate(zip(actual, ran.own, strict=False))
        if t is not None
        and exact is not None
        and is_float(t)
        and exact.shape == t.shape
        and t.numel()
    ]
    if not powers:
        return {}
    used = _Used(call)
    operands = _operands(used, shadow)
    if call.func.overloadpacket is _CONVOLUTION_BACKWARD:
        chosen = {_GRADIENTS[one[0]]: one for one in powers if one[0] in _GRADIENTS}
    else:  # results differ in size, as the gradients of q, k and v do: the one that lost most
        name = product_of(operands) if kind in ("product", "convolution") else None
        chosen = {name or RESULT: max(powers, key=lambda one: one[2] / max(one[1], 1e-300))}
    has_casts = any(shadow.before.packed(t) is not None for t in call.inputs)
    losses = {}
    for name, (i, signal, noise) in chosen.items():
        lost, one, in_fp32 = Lost(signal, noise), actual[i], ran.total[i]
        assert one is not None
        if in_fp32 is ran.own[i]:
            lost.total_signal, lost.total_noise = signal, noise
        elif in_fp32 is not None:
            lost.total_signal, lost.total_noise = power(in_fp32), power(in_fp32 - one)
        lost.operands = {
            role: operand
            for role, operand in operands.items()
            if name == RESULT or role in ROLES_OF[name]
        }
        if not (has_casts and _is_estimated(lost, one, used)):
            _arithmetic(lost, call, one, ran, i, used if has_casts else None)
        if shadow.what_if and kind == "product" and name != RESULT:
            lost.what_if = _what_if(used, shadow)
        elif kind == "convolution":
            lost.what_if = _what_if_convolved(call, ran, i, shadow)
        losses[name] = lost
    return losses


def _what_if(used: _Used, shadow: Shadow) -> dict[str, tuple[float, float]]:
    names = used.call.listed.operands  # type: ignore[union-attr]
    a, b = (used.call.given[name] for name in names[:2])
    if len(names) != 2 or not a.dim() == b.dim() == 2:
        return {}
    roles = shadow.roles.get(a) or "x", shadow.roles.get(b) or "x"
    rows, columns = shadow.own(a, lambda: used[names[0]]), shadow.own(b, lambda: used[names[1]])
    exact, b_t = rows @ columns, columns.t()
    halves = {n: squares(exact, product(r, roles, rows, b_t)) for n, r in shadow.what_if.items()}
    return {name: (float(signal), float(noise)) for name, (signal, noise) in halves.items()}


def _what_if_convolved(
    call: Call, ran: Ran, i: int, shadow: Shadow
) -> dict[str, tuple[float, float]]:
    halves, exact, given = {}, ran.own[i], call.given
    assert exact is not None
    kind = "forward" if "grad_output" not in given else GEMMS[1 + i]
    for name, listed in shadow.what_if.items():
        recipe = listed.product(kind)

        def value(t: torch.Tensor, known: Any = None, recipe: Recipe = recipe) -> torch.Tensor:
            wide = shadow.own(t)
            if t is given.get("bias") or t.dim() < 3:
                return wide
            role = shadow.roles.get(t) or "x"
            weight, transposed = given["weight"], bool(given.get("transposed"))
            return _cast_of_convolution(recipe, role, wide, weight, transposed).to(wide.dtype)

        got = ran.again(value)[i]
        if got is not None:
            halves[name] = power(exact), power(exact - got)
    return halves


class _Used(dict[str, torch.Tensor]):
    """The values of the operands that an op computes with, by name."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __missing__(self, name: str) -> torch.Tensor:
        has_scales, given = self.call.func.namespace == "mixprec", self.call.given
        self[name] = reference.decoded(given, name) if has_scales else widened(given[name])
        return self[name]

    def of(self, t: torch.Tensor) -> torch.Tensor:
        name = next((name for name, given in self.call.given.items() if given is t), None)
        return t if t.dtype not in FLOATS else widened(t) if name is None else self[name]


def _results(call: Call) -> list[torch.Tensor | None]:
    schema, result = call.func._schema, call.result
    if schema.is_mutable and not schema.returns:  # gemm_accumulate_
        return [call.given["acc"]]
    results = result if isinstance(result, (tuple, list)) else [result]
    return [t if isinstance(t, torch.Tensor) else None for t in results]


def _operands(used: _Used, shadow: Shadow) -> dict[str, Operand]:
    operands: dict[str, Operand] = {}
    for name in used.call.listed.operands:  # type: ignore[union-attr]
        t = used.call.given[name]
        if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or not t.numel():
            continue
        before, square, expected = shadow.before.get(t), 0.0, None
        if before is None:
            before = shadow.total.get(t)
        elif (fmt := shadow.formats.get(t)) is not None:
            square = power(before)
            expected = _cast_noise(before, square, fmt, along=-2 if name == "b" else -1)
        operand = operands.setdefault(shadow.roles.get(t) or "x", Operand())
        before = used[name] if before is None else before
        operand.add(used[name], before, square, expected, t if t.dtype.itemsize == 1 else None)
    return operands


def _is_estimated(lost: Lost, actual: torch.Tensor, used: _Used) -> bool:
    """Of a large product of two matrices, the noise against FP32 of the operands as they are, by a
    few sums over all of its elements; False: of another op, or where something is not finite."""
    names = _matrices(used.call)
    if names is None:
        return False
    a, b = used[names[0]], used[names[1]]
    bias = None if names[2] is None else used[names[2]]
    total, noise = power(actual), estimated_noise(actual, a, b, bias)
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
    lost: Lost, call: Call, actual: torch.Tensor, ran: Ran, i: int, used: _Used | None
) -> None:
    """The noise of the i-th result against FP32 of the operands as they are, and what explains it:
    its rounding, the sums, and what is rounded in between, which is taken to be as if the operands
    were rounded once more."""

    def as_cast(t: torch.Tensor, known: Any = None) -> torch.Tensor:
        if used is not None:
            return used.of(t)
        return widened(t) if t.dtype in FLOATS else t

    assert call.listed is not None
    is_product, inputs = call.listed.kind == "product", call.inputs
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
    if is_product:
        lost.expected += _summing(max(t.shape[-1] for t in inputs if t.dim()), total, want.numel())
    if is_product and len(call.listed.operands) > 2:
        lost.noise = lost.expected = 0.0  # a sum of products of three: torch says not in what
        return
    if is_product or lost.noise <= lost.expected:
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

    again = ran.again(rounded)[i]
    if again is not None:
        lost.expected += power(want - (again if finite is None else torch.where(finite, again, 0)))


def _rounding(dtype: torch.dtype, square: float, numel: int) -> float:
    """The noise of numbers with this sum of squares that are rounded to dtype."""
    info = torch.finfo(dtype)
    # A processor may flush what is below FP32's normal range.
    flushes = info.smallest_normal == _FLUSHED
    step = float(info.smallest_normal) * (1.0 if flushes else float(info.eps))
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


def _matrices(call: Call) -> tuple[str, str, str | None] | None:
    """The names of a, b and the bias of an op that computes a @ b + bias of two large matrices;
    None: it computes something else, or something small."""
    func, given = call.func, call.given
    a, b, bias = "a", "b", "bias"
    if func is aten.mm.default:
        a, b, bias = "self", "mat2", ""
    elif func is aten.addmm.default and given["alpha"] == given["beta"] == 1:
        a, b, bias = "mat1", "mat2", "self"
    elif ours(func) not in (gemm_op, gemm_simulated_op):
        return None
    added = given.get(bias)
    if not given[a].dim() == given[b].dim() == 2 or not (added is None or added.dim() == 1):
        return None
    is_large = min(*given[a].shape, *given[b].shape) >= _LARGE
    return (a, b, None if added is None else bias) if is_large else None


def estimated_noise(
    result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> float:
    """The squared distance of a result from a @ b + bias, estimated."""
    signs = _signs(b.shape[1], b.device)
    left = result.float() @ signs - a @ (b @ signs)
    left = left if bias is None else left - bias @ signs
    return float(left.double().square().sum()) / _SIGNS


@functools.lru_cache(8)
def _signs(rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows, _SIGNS), generator=generator).float() * 2 - 1
    return signs.to(device)


def what_if_recipes(names: Iterable[Recipe | str]) -> dict[str, Recipe]:
    """The recipes of what_if=, by name, with rounding to nearest: no random numbers are drawn."""
    recipes = {}
    for name in names:
        recipe = Recipe.parse(name)
        if recipe.is_delayed:
            raise ValueError(
                "audit: what_if must be a recipe with scales of the tensors that it casts, got "
                f"{recipe.name}, whose scales are of earlier steps"
            )
        if recipe.outliers:
            raise ValueError(
                f"audit: what_if must be a recipe without outliers, got {recipe.name}, whose "
                "indices are those of a layer"
            )
        products = tuple((n, replace(r, stochastic_rounding=())) for n, r in recipe.products)
        recipes[recipe.name] = replace(recipe, stochastic_rounding=(), products=products)
    return recipes


def _cast_of_convolution(
    recipe: Recipe, role: str, t: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """The values of an operand of a convolution, FP32, cast as that of mixprec.nn casts it: as
    points if it combines only channels, else as [first dimension, all the rest]. recipe: that of
    the product."""
    if role != "w" and not transposed and all(size == 1 for size in weight.shape[2:]):
        points = t.movedim(1, -1)
        return cast(recipe, role, points.flatten(0, -2)).view(points.shape).movedim(-1, 1)
    return cast(recipe, role, t.flatten(1)).view(t.shape)
