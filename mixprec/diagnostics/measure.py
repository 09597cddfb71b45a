"""What a cast by a recipe makes of a tensor: values, products of them, sums, SQNR."""

from __future__ import annotations

import dataclasses
import math

import torch

from ..formats import Format
from ..functional import operands
from ..functional._products import ROLES
from ..functional.operands import Delayed
from ..ops._reference import block_formats, scale_layout
from ..ops._reference.block_formats import hadamard, sizes
from ..recipes import Recipe

# What `cast_sums` and `output_sums` return, in this order, FP64. Sums of two parts of a tensor are
# added; for amax and the scales the extremes are kept.
FIELDS = (
    *("elements", "amax", "scale_min", "scale_max"),
    *("overflow", "underflow", "inf", "nan", "signal", "noise"),
)


def _stacked(wide: torch.Tensor, **known: torch.Tensor | float) -> torch.Tensor:
    """FIELDS of a tensor in FP32, in their order; NaN for a field that is not in `known`."""
    values = {
        "elements": float(wide.numel()),
        "amax": wide.abs().amax() if wide.numel() else wide.new_zeros(()),  # NaN if any is NaN
        "inf": torch.isinf(wide).sum(),
        "nan": torch.isnan(wide).sum(),
        **known,
    }
    fields = []
    for name in FIELDS:
        v = values.get(name, math.nan)
        v = v if isinstance(v, torch.Tensor) else wide.new_full((), v, dtype=torch.float64)
        fields.append(v.detach().double().reshape(()))
    return torch.stack(fields)


def squares(ref: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of ref^2, sum of (ref - x)^2) in FP64, the two halves of an SQNR."""
    signal, noise = ref.double(), ref.double() - x.double()
    return signal.square().sum(), noise.square().sum()


def sqnr(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); inf for no noise, nan where either is not finite, None where both
    are 0."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf if signal > 0 else None
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def largest_kept(fmt: Format) -> float:
    """The magnitude above which rounding to nearest would go beyond fmt.max: max + half a step."""
    step = 2.0 ** math.floor(math.log2(fmt.max)) * fmt.eps
    return fmt.max + step / 2


def decoded(
    operand: operands.Matrix, x: torch.Tensor, block_format: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The values of a cast of x [M, K], its scale_inv, and the one of each element, all FP32."""
    m, k = x.shape
    scale_inv, tensor = operand.scale_inv, operand.tensor_scale_inv
    assert scale_inv is not None
    if block_format is None:
        each = scale_layout.expand(scale_inv, m, k)
        return operand.data.float() * each, scale_inv, each
    scale_inv = scale_layout.unswizzle(scale_inv, m, sizes(block_format, k)[1])
    kept = operands.decoded(operand, k, block_format, torch.float32)
    block = block_formats.parse("decoded", block_format)
    wide = block_formats.scales(block, scale_inv, tensor)
    return kept, wide, wide.repeat_interleave(block.block, dim=-1)[:, :k]


def cast(recipe: Recipe, role: str, rows: torch.Tensor, size: int = 0) -> torch.Tensor:
    """The values of rows [R, C], which a product sums along C, cast as this role: FP32. size: of
    the rotation."""
    rows = rows.float().contiguous()
    rows = hadamard(rows, size) if size else rows
    operand = operands.cast(rows, role, recipe.unrotated, None, use_t=False, record=False).matrix
    if operand.scale_inv is None:
        return operand.data.float()
    return decoded(operand, rows, recipe.block_format(role))[0]


def product(
    recipe: Recipe, roles: tuple[str, str], a: torch.Tensor, b_t: torch.Tensor
) -> torch.Tensor:
    """a [M, K] @ b_t [N, K]^T in FP32, of what the recipe makes of them in these roles."""
    name = next((n for n, of in ROLES.items() if {*of} == {*roles}), "forward")
    recipe = recipe.product(name)
    size = recipe.rotation(name)
    return cast(recipe, roles[0], a, size) @ cast(recipe, roles[1], b_t, size).t()


@torch.no_grad()
def cast_sums(
    x: torch.Tensor, role: str, recipe: Recipe, delayed: Delayed | None, *, sqnr: bool
) -> torch.Tensor:
    """FIELDS of the cast that `recipe` makes of x [..., C] as `role`: "x", "w" or "g"; of that for
    forward, or of g for grad_input.

    The cast is repeated by the same op with the same scale; delayed state is not modified, and
    rounding is to nearest also where the recipe's is stochastic, to leave torch's generator alone.
    overflow: finite elements that come out as Inf, or, in FP8, that saturate: |x * scale| is more
    than half a step above the format's maximum. underflow: nonzero elements that become 0. signal,
    noise: see `squares`, of x and q(x) / scale; NaN unless sqnr.
    """
    x = x.detach()
    recipe = recipe.casts(role)[0].unrotated
    fmt: Format = getattr(recipe, role)
    if recipe.stochastic_rounding:
        recipe = dataclasses.replace(recipe, stochastic_rounding=())
    operand = operands.cast(x, role, recipe, delayed, use_t=False, record=False).matrix
    wide = x.float().reshape(scale_layout.as_matrix(x.shape))
    finite = torch.isfinite(wide)
    if operand.scale_inv is None:
        kept = operand.data.float()
        overflow = finite & ~torch.isfinite(kept)
        low = high = torch.ones((), dtype=torch.float32, device=x.device)
    else:
        kept, scale_inv, each = decoded(operand, wide, recipe.block_format(role))
        overflow = finite & (wide.abs() > largest_kept(fmt) * each)
        scales = 1.0 / scale_inv
        none = scales.new_ones(())
        low, high = (scales.amin(), scales.amax()) if scales.numel() else (none, none)
    lost = {"overflow": overflow.sum(), "underflow": ((wide != 0) & (kept == 0)).sum()}
    if sqnr:
        lost["signal"], lost["noise"] = squares(wide, kept)
    return _stacked(wide, scale_min=low, scale_max=high, **lost)


@torch.no_grad()
def output_sums(y: torch.Tensor, ref: torch.Tensor | None) -> torch.Tensor:
    """FIELDS of a layer's output y, whose scale is 1. ref: the same in FP32; without it overflow,
    underflow, signal and noise are NaN."""
    wide = y.detach().float()
    lost = {}
    if ref is not None:
        lost["overflow"] = (torch.isfinite(ref) & ~torch.isfinite(wide)).sum()
        lost["underflow"] = ((ref != 0) & (wide == 0)).sum()
        lost["signal"], lost["noise"] = squares(ref, wide)
    return _stacked(wide, scale_min=1.0, scale_max=1.0, **lost)
