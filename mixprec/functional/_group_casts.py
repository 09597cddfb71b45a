"""The operands of grouped products: rows in groups and stacked weights in the formats of a recipe.

Each group and each weight has the scales that it would have alone, and no group's size is read on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from ..ops._reference.gemm_scales import CHUNK
from ..ops.quantize import quantize_op
from ..ops.quantize_mx import quantize_mx_op
from ..ops.scale import new_scales
from ..recipes import DELAYED_ROLES, Recipe
from . import operands
from .operands import Delayed, Matrix, Operand


def _index(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [rows]: the group of each row, E beyond the last group."""
    row = torch.arange(rows, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs.contiguous(), row, right=True)


def space_apart(offs: torch.Tensor, rows: int) -> int:
    """Rows of a copy in which each group begins at a multiple of 128: enough for groups of any
    size, each with fewer than 128 rows of padding."""
    return (rows + (CHUNK - 1) * offs.shape[0]) // CHUNK * CHUNK


def _spread(x: torch.Tensor, offs: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x with its groups along `dim` at multiples of 128, zeros between them; and the new offs."""
    rows, space = x.shape[dim], space_apart(offs, x.shape[dim])
    starts, index = pad(offs, (1, 0)), _index(offs, rows)
    padded = (starts.diff() + CHUNK - 1) // CHUNK * CHUNK
    ends = torch.cumsum(padded, 0, dtype=torch.int32)
    row = torch.arange(rows, device=x.device)
    place = row + (pad(ends, (1, 0)) - starts).index_select(0, index)
    # Rows beyond the last group go behind all of them, and so does what invalid offs, which a GPU
    # does not refuse, would put beyond the copy.
    place = torch.where(index < offs.shape[0], place, space).clamp(0, space)
    shape = list(x.shape)
    shape[dim] = space + 16  # so that lines along S begin at multiples of 16 bytes
    return x.new_zeros(shape).index_copy_(dim, place, x).narrow(dim, 0, space), ends


def _amax(magnitudes: torch.Tensor, index: torch.Tensor, groups: int) -> torch.Tensor:
    """The maxima [E + 1, ...] of each group of [S, ...], 0 for an empty one."""
    index = index.view(-1, *[1] * (magnitudes.dim() - 1)).expand_as(magnitudes)
    zeros = magnitudes.new_zeros((groups + 1, *magnitudes.shape[1:]))
    return zeros.scatter_reduce(0, index, magnitudes, "amax")


def in_one_call(recipe: Recipe) -> bool:
    """Whether the products of all groups with this recipe are one call.

    Not where a scale is of all of a group and of its blocks ("nvfp4"), where rows of x or g share a
    scale across groups, where groups are rotated, where one of x and g has blocks along S and the
    other not, or where products have recipes of their own.
    """
    if recipe.products:
        return False
    rows = (recipe.x_granularity, recipe.g_granularity)
    if recipe.is_block:
        return {*rows, recipe.w_granularity} == {"mx"} and not recipe.hadamard
    if "block128x128" in rows:
        return False
    return (rows[0] == "block1x128") == (rows[1] == "block1x128")


def cast_rows(
    x: torch.Tensor,
    role: str,
    recipe: Recipe,
    delayed: Delayed | None,
    offs: torch.Tensor,
    *,
    use_t: bool,
    record: bool = True,
    groups: Sequence[Any] = (),
) -> tuple[Matrix, Operand, torch.Tensor]:
    """Cast x [S, C] with the recipe's settings for `role`, "x" or "g": what the products by rows
    read, what grad_weight reads, and the ends of the groups in its transpose. groups: as in
    `operands.cast`.

    Matrix: data [S, C] with scale_inv as `gemm_grouped` takes it for rows. Operand: of the
    transpose, data [C, S'] with scale_inv [E, C, 1], [E, 1, 1] or [C, ceil(S'/128)].
    """
    rows, operand, ends = _cast_rows(x, role, recipe, delayed, offs, use_t, record, groups)
    own_t = operand.own_t
    # A GPU loads 16 codes along S at once, of groups that begin at multiples of 16.
    if use_t and x.is_cuda and ends is offs and own_t is not None and own_t.data.itemsize == 1:
        data, ends = _spread(own_t.data.view(torch.uint8), offs, 1)
        operand = operand._replace(own_t=own_t._replace(data=data.view(own_t.data.dtype)))
    return rows, operand, ends


def _cast_rows(
    x: torch.Tensor,
    role: str,
    recipe: Recipe,
    delayed: Delayed | None,
    offs: torch.Tensor,
    use_t: bool,
    record: bool,
    groups: Sequence[Any],
) -> tuple[Matrix, Operand, torch.Tensor]:
    fmt, granularity = getattr(recipe, role), getattr(recipe, f"{role}_granularity")
    if fmt.bits == 16:
        operand = operands.cast(x, role, recipe, delayed, use_t=use_t)
        return operand.matrix, operand, offs
    if delayed is not None and role in DELAYED_ROLES:
        # One scale for all. What lies beyond the groups is not seen.
        seen = (_index(offs, x.shape[0]) < offs.shape[0]).unsqueeze(1)
        x = torch.where(seen, x, torch.zeros_like(x))
        operand = operands.cast(x, role, recipe, delayed, use_t=use_t, record=record)
        return operand.matrix, operand, offs
    if granularity == "tensor":
        return *_by_group(x, role, recipe, offs, use_t, groups), offs
    matrix = Matrix(*_rows(x, role, recipe, granularity))
    if not use_t:
        return matrix, Operand(matrix), offs
    if granularity == "row":
        index = _index(offs, x.shape[0])
        scale, inv = _scales(_amax(x.abs().float(), index, offs.shape[0]), role, recipe)
        _, data_t = _cast(x.float() * scale.index_select(0, index), role, recipe, use_t)
        inv = inv.narrow(0, 0, offs.shape[0]).unsqueeze(2)
        return matrix, Operand(matrix, Matrix(data_t, inv)), offs
    spread, ends = _spread(x, offs)
    matrix_t = Matrix(*_rows(spread.t(), role, recipe, granularity))
    return matrix, Operand(matrix, matrix_t), ends


def _by_group(
    x: torch.Tensor,
    role: str,
    recipe: Recipe,
    offs: torch.Tensor,
    use_t: bool,
    groups: Sequence[Any],
) -> tuple[Matrix, Operand]:
    """x [S, C] with one scale for each group, with that of each row and that of each group."""
    if x.shape[1] == 0:
        rows = x.new_zeros(x.shape[0], dtype=torch.float32)
    else:
        rows = vector_norm(x, torch.inf, 1, dtype=torch.float32)
    index = _index(offs, x.shape[0])
    amax = operands.largest_of_all(_amax(rows, index, offs.shape[0]), groups)
    scale, inv = _scales(amax, role, recipe)
    data, data_t = _cast(x.float() * scale.index_select(0, index).unsqueeze(1), role, recipe, use_t)
    row_inv = inv.index_select(0, index).unsqueeze(1)
    group_inv = inv.narrow(0, 0, offs.shape[0]).view(-1, 1, 1)
    own_t = Matrix(data_t, group_inv) if use_t and x.is_cuda else None
    return Matrix(data, row_inv), Operand(Matrix(data, group_inv), own_t)


def _scales(amax: torch.Tensor, role: str, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that `quantize` takes for these maxima, and their inverses."""
    return new_scales(amax, getattr(recipe, role).dtype, recipe.power_of_two_scale)


def _cast(
    scaled: torch.Tensor, role: str, recipe: Recipe, use_t: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x * scale [S, C], in FP32, as codes; and their transpose, in the layout of its GEMM."""
    transpose = use_t and scaled.is_cuda  # see operands.wants_k_major
    one, dtype = scaled.new_ones(()), getattr(recipe, role).dtype
    data, data_t, *_ = quantize_op(scaled, dtype, one, transpose, "tensor", True)
    if not use_t:
        return data, None
    return data, data_t if transpose else data.t()


def _rows(
    x: torch.Tensor, role: str, recipe: Recipe, granularity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, C] with the scales of a granularity that has several."""
    if not recipe.is_block:
        dtype, power_of_two = getattr(recipe, role).dtype, recipe.power_of_two_scale
        data, _, inv, *_ = quantize_op(x, dtype, None, False, granularity, power_of_two)
        return data, inv
    text, seed = recipe.block_cast(role), None
    if role in recipe.stochastic_rounding:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    data, _, inv, *_ = quantize_mx_op(x, text, recipe.scale_mode, False, seed, False, False)
    return data, inv


def cast_weights(
    weight: torch.Tensor, recipe: Recipe, *, use_t: bool, groups: Sequence[Any] = ()
) -> Operand:
    """Cast weight [E, N, K], and its transposes [E, K, N], each with scales [E, ...] of its own."""
    fmt, granularity = recipe.w, recipe.w_granularity
    if fmt.bits == 16:
        return Operand(Matrix(weight.to(fmt.dtype)))
    experts, n, k = weight.shape
    if granularity == "tensor" and groups:
        amax = vector_norm(weight.flatten(1), torch.inf, 1, dtype=torch.float32)
        amax = operands.largest_of_all(amax, groups).view(-1, 1, 1)
        scale, inv = _scales(amax, "w", recipe)
        data, _ = _cast(weight.float() * scale, "w", recipe, False)
    elif granularity == "tensor":  # the one row of an expert
        data, inv = _rows_of_weights(weight.reshape(experts, 1, n * k), recipe, "row")
        data = data.view(weight.shape)
    elif granularity == "block128x128":  # squares of one expert
        padded = pad(weight, (0, 0, 0, -n % CHUNK))
        data, inv = _rows_of_weights(padded, recipe, granularity)
        data = data.narrow(1, 0, n)
    else:
        matrix = Matrix(*_rows_of_weights(weight, recipe, granularity))
        if not use_t:
            return Operand(matrix)
        return Operand(
            matrix, Matrix(*_rows_of_weights(weight.transpose(1, 2), recipe, granularity))
        )
    matrix = Matrix(data, inv)
    if not (use_t and weight.is_cuda):
        return Operand(matrix)
    data_t = data.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return Operand(matrix, matrix.t()._replace(data=data_t))


def _rows_of_weights(
    weight: torch.Tensor, recipe: Recipe, granularity: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [E, R, C], all of it cast at once: data [E, R, C or less] and scale_inv [E, r, c], or
    of block formats [E * R, c]."""
    experts, rows, columns = weight.shape
    data, inv = _rows(weight.reshape(experts * rows, columns), "w", recipe, granularity)
    if not recipe.is_block:
        scale_rows = rows // CHUNK if granularity == "block128x128" else rows
        inv = inv.view(experts, scale_rows, inv.shape[1])
    return data.view(experts, rows, data.shape[1]), inv
