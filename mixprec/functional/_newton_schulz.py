"""orthogonalize: Newton-Schulz iterations on low-precision matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..formats import E4M3
from ..ops._dispatch import checks, simulation
from ..ops._reference.gemm_scales import Operands
from ..ops.dequantize import dequantize
from ..ops.gemm import accumulate
from ..ops.gemm import run as gemm
from ..ops.quantize import quantize

DTYPES = ("bf16", "fp8")
# On a CPU: columns of a symmetric matrix that are computed at a time, 0.7 of the time of all at
# once; elements of 3 passes in the cache.
_STRIP, _CACHED = 128, 2**16
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonalize(
    x: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: str = "bf16",
) -> torch.Tensor:
    """A matrix near U V^T for x = U S V^T: the same singular vectors, singular values about 1.

        y = x / max(norm(x), eps)                          x^T where x has more rows than columns
        y = a y + (b A + c A A) y  with  A = y y^T         `steps` times, a, b, c = coefficients

    x: [M, N], any real dtype and strides -> [M, N] fp32. Products and sums are FP32; y, A and the
    sum in parentheses are each rounded once, to bf16, or with dtype="fp8" to E4M3 scaled per
    tensor, before they enter a product. The default coefficients bring singular values to between
    0.7 and 1.2, not to 1 exactly; with FP8 errors of 10% come on top. ValueError if x is not a
    matrix or dtype is another. Source: Muon (Jordan et al., 2024).
    """
    if x.dim() != 2:
        raise ValueError(f"orthogonalize: x must be [M, N], got shape {tuple(x.shape)}")
    if dtype not in DTYPES:
        raise ValueError(f'orthogonalize: dtype must be "bf16" or "fp8", got {dtype!r}')
    checks.needs_no_grad("orthogonalize", "call it under torch.no_grad()", x)
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    wide = x.float().t() if tall else x.float()
    y = wide / wide.norm().clamp(min=eps)
    # Rounded everywhere, not only in the products: where a y is of another y than A and A of
    # another than A A, large singular values no longer shrink, and with FP8 they diverge.
    if dtype == "bf16" and x.device.type == "cpu":
        y = y.contiguous()
        _iterate_on_cpu(y, coefficients, steps)
        return y.t() if tall else y
    for _ in range(steps):
        low = _round(y, dtype)
        gram = _round(_product(low, low.transposed), dtype)
        weights = _product(gram, gram).mul_(c).add_(gram.value, alpha=b)
        y = _product(_round(weights, dtype), low).add_(low.value, alpha=a)
    return y.t() if tall else y


def _iterate_on_cpu(y: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> None:
    """In bf16, in place: memory that is new in each step costs a fifth of the time."""
    a, b, c = coefficients
    m, n = y.shape
    low, simulated = y.bfloat16(), simulation.current()
    times_c, rows = y.new_full((), c), max(1, _CACHED // max(n, 1))

    def product(left: torch.Tensor, right: torch.Tensor, scale: Any = None) -> torch.Tensor:
        return gemm(Operands(left, right, scale, None), None, torch.float32, False, simulated)

    def gram_of(end: int, columns: slice) -> torch.Tensor:
        return product(low[:end], low[columns].t())

    def weights_of(end: int, columns: slice) -> torch.Tensor:
        squared = product(gram[:end], gram[:, columns], times_c)
        return squared.add_(gram[:end, columns], alpha=b)

    for _ in range(steps):
        if m <= 2 * _STRIP:
            gram = product(low, low.t()).bfloat16()
            weights = product(gram, gram, times_c).add_(gram, alpha=b).bfloat16()
        else:
            gram = _symmetric(m, gram_of)
            weights = _symmetric(m, weights_of)
        accumulate(y.zero_(), Operands(weights, low, None, None), simulated)
        for i in range(0, m, rows):
            part = low[i : i + rows]
            part.copy_(y[i : i + rows].add_(part, alpha=a))


def _symmetric(m: int, strip: Callable[[int, slice], torch.Tensor]) -> torch.Tensor:
    """The matrix [m, m] in bf16 of which strip(end, columns) computes the rows :end. These are a
    little more than half of it; the rest has the same bits."""
    matrix = torch.empty(m, m, dtype=torch.bfloat16, device="cpu")
    for start in range(0, m, _STRIP):
        end = min(start + _STRIP, m)
        columns = slice(start, end)
        matrix[:end, columns] = strip(end, columns)
        matrix[columns, :start] = matrix[:start, columns].t()
    return matrix


class _Rounded(NamedTuple):
    """A matrix in the format of the operands."""

    value: torch.Tensor  # in a dtype for sums
    left: torch.Tensor
    right: torch.Tensor  # FP8 tensor cores want it column by column
    scale_inv: torch.Tensor | None

    @property
    def transposed(self) -> _Rounded:
        return self._replace(right=self.left.t())  # as the right operand


def _round(y: torch.Tensor, dtype: str) -> _Rounded:
    if dtype == "bf16":
        low = y.bfloat16()
        return _Rounded(low, low, low, None)
    q = quantize(y, E4M3, transpose=True)
    assert q.data_t is not None
    return _Rounded(dequantize(q), q.data, q.data_t.t(), q.scale_inv)


def _product(a: _Rounded, b: _Rounded) -> torch.Tensor:
    operands = Operands(a.left, b.right, a.scale_inv, b.scale_inv)
    return gemm(operands, None, torch.float32, False, simulation.current())
