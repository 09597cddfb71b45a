"""The noise of a product, without computing it again.

Of E = C - A @ B and S [N, s] of random signs, the mean of ||C @ S - A @ (B @ S)||^2 / s is ||E||^2
(Hutchinson, 1989; Freivalds' check of a product, 1977), off by sqrt(2 / s) of it at most, at
s (1 / M + 1 / N + 1 / K) of the product's cost. Every element of C counts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...ops.gemm import gemm_op, gemm_simulated_op
from .ops import Arguments

_SIGNS = 32
_LARGE = 8 * _SIGNS  # from here on it is cheaper than the product
aten = torch.ops.aten
_OURS = {
    f"mixprec::{op.variant_name(v)}"
    for op in (gemm_op, gemm_simulated_op)
    for v in ("cpp", "reference", "triton", "vendor")
}


def operands(func: Any, given: Arguments) -> tuple[str, str, str | None] | None:
    """The names of a, b and the bias of func, which computes a @ b + bias of two large matrices;
    None: it computes something else, or something small."""
    a, b, bias = "a", "b", "bias"
    if func is aten.mm.default:
        a, b, bias = "self", "mat2", ""
    elif func is aten.addmm.default and given["alpha"] == given["beta"] == 1:
        a, b, bias = "mat1", "mat2", "self"
    elif func.name() not in _OURS:
        return None
    added = given.get(bias)
    if not given[a].dim() == given[b].dim() == 2 or not (added is None or added.dim() == 1):
        return None
    is_large = min(*given[a].shape, *given[b].shape) >= _LARGE
    return (a, b, None if added is None else bias) if is_large else None


def noise(
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
