"""The groups of a grouped product: their ranges along S, their operands and scales.

S is the rows of a [S, K] beside b [E, K, N], and the K of a [M, S] beside b [S, N].
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from .._dispatch import checks
from .gemm_scales import CHUNK, Operands, chunks


def by_rows(operands: Operands) -> bool:
    """Whether rows of a are grouped, and not K."""
    return operands.b.dim() == 3


def groups(operands: Operands, offs: torch.Tensor) -> Iterator[tuple[slice, Operands]]:
    """The range of each group along S, and its product."""
    a, b, a_inv, b_inv = operands
    s = a.shape[0 if by_rows(operands) else 1]
    # Ends that are not valid, which a GPU cannot refuse, make groups empty.
    ends = offs.clamp(0, s).cummax(0).values.tolist()
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        part, of_chunks = slice(start, end), slice(start // CHUNK, chunks(end))
        if by_rows(operands):
            of_a = a_inv if a_inv is None or a_inv.numel() == 1 else a_inv[part]
            of_b = b_inv if b_inv is None or b_inv.numel() == 1 else b_inv[e]
            yield part, Operands(a[part], b[e], of_a, of_b)
        else:
            of_a, of_b = a_inv, b_inv
            if a_inv is not None and a_inv.numel() != 1:
                of_a = a_inv[e] if a_inv.dim() == 3 else a_inv[:, of_chunks]
            if b_inv is not None and b_inv.numel() != 1:
                of_b = b_inv[e] if b_inv.dim() == 3 else b_inv[of_chunks]
            yield part, Operands(a[:, part], b[part], of_a, of_b)


def check_scales(op: str, operands: Operands, offs: torch.Tensor) -> None:
    """They are fp32 with one element, or of a shape that `gemm_grouped` lists."""
    a, b, a_scale_inv, b_scale_inv = operands
    experts, (rows, k), n = offs.shape[0], a.shape, b.shape[-1]
    along = chunks(k)
    shapes_a: dict[str, tuple[int, ...]]
    shapes_b: dict[str, tuple[int, ...]]
    if by_rows(operands):
        shapes_a = {"[S, 1]": (rows, 1), "[S, ceil(K/128)]": (rows, along)}
        shapes_b = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, 1, N]": (experts, 1, n),
            "[E, ceil(K/128), N]": (experts, along, n),
            "[E, ceil(K/128), ceil(N/128)]": (experts, along, chunks(n)),
        }
    else:
        shapes_a = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, M, 1]": (experts, rows, 1),
            "[M, ceil(S/128)]": (rows, along),
        }
        shapes_b = {
            "[E, 1, 1]": (experts, 1, 1),
            "[E, 1, N]": (experts, 1, n),
            "[ceil(S/128), N]": (along, n),
        }
    _check_scale(op, "a_scale_inv", a_scale_inv, shapes_a, a)
    _check_scale(op, "b_scale_inv", b_scale_inv, shapes_b, a)


def _check_scale(
    op: str,
    name: str,
    t: torch.Tensor | None,
    shapes: dict[str, tuple[int, ...]],
    a: torch.Tensor,
) -> None:
    if t is None:
        return
    checks.has_dtype(op, name, t, (torch.float32,))
    checks.on_device(op, name, t, a.device, "a")
    if t.numel() != 1 and tuple(t.shape) not in shapes.values():
        fitting = ", ".join(f"{meaning} = {shape}" for meaning, shape in shapes.items())
        raise ValueError(
            f"{op}: {name} must hold one element or have one of the shapes {fitting}, got shape "
            f"{tuple(t.shape)}"
        )


def check_offs(op: str, operands: Operands, offs: torch.Tensor) -> None:
    """The values, where they can be read without a host sync."""
    if offs.device.type != "cpu" or torch.compiler.is_compiling() or type(offs) is not torch.Tensor:
        return
    s = operands.a.shape[0 if by_rows(operands) else 1]
    ends = [0, *offs.tolist(), s]
    if ends != sorted(ends):
        raise ValueError(
            f"{op}: offs must be the ends of the groups, ascending from 0 to S = {s}, got "
            f"{ends[1:-1]}"
        )
    scales = (operands.a_scale_inv, 1), (operands.b_scale_inv, 0)
    along_s = (t is not None and t.dim() == 2 and t.shape[dim] > 1 for t, dim in scales)
    if by_rows(operands) or not any(along_s):
        return
    starts = [start for start, end in pairwise(ends[:-1]) if start < end]
    if any(start % CHUNK for start in starts):
        raise ValueError(
            f"{op}: offs must begin each group at a multiple of 128 where scales change along S, "
            f"got {ends[1:-1]}"
        )
