"""norm_quantize and act_quantize with their backward ops: in FP32, in the defined order.

Activations and their slopes are the reference's own: test_act_quantize.py has their values.
"""

from __future__ import annotations

from typing import Any

import independent as ind
import numpy as np
import torch
from definitions_casts import filled, fp32, matrix, quantize

from mixprec.ops._dispatch.op import OPS

F32 = np.float32
PLAIN = (torch.float32, None, False, "tensor", True)  # the cast of a fused op that casts nothing


def row_sums(x: np.ndarray) -> np.ndarray:
    """[M, 1]: one FP32 addition after the other, in the defined order."""
    partial = np.zeros((len(x), 256), F32)
    for first in range(0, x.shape[1], 256):
        part = x[:, first : first + 256]
        partial[:, : part.shape[1]] += part
    while partial.shape[1] > 1:
        left, right = np.split(partial, 2, axis=1)
        partial = left + right
    return partial


def column_sums(x: np.ndarray) -> torch.Tensor:
    total = np.zeros(x.shape[1], F32)
    for band in range(0, len(x), 64):
        of_band = np.zeros(x.shape[1], F32)
        for row in x[band : band + 64]:
            of_band = of_band + row
        total = total + of_band
    return fp32(total)


def wide(x: torch.Tensor | None) -> Any:
    """As [M, K] in FP32."""
    return None if x is None else ind.values(matrix(x)).astype(F32)


@np.errstate(all="ignore")
def norm_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, subtract_mean: bool, *cast: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    rows, total, mean, k = wide(x), torch.zeros(0, dtype=x.dtype), torch.zeros(0), F32(x.shape[-1])
    if residual is not None:
        total = filled(ind.narrow(rows + wide(residual), x.dtype), x.dtype).reshape(x.shape)
        rows = wide(total)
    if subtract_mean:
        average = row_sums(rows) / k
        rows, mean = rows - average, fp32(average, len(rows))
    variance = row_sums(rows * rows) / k
    rstd = np.where(np.isinf(variance), F32(np.nan), F32(1) / np.sqrt(variance + F32(eps)))
    y = rows * rstd
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return *quantize(fp32(y, *x.shape), *cast), total, mean, fp32(rstd, len(rows))


@np.errstate(all="ignore")
def norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor,
    rstd: torch.Tensor, g_total: torch.Tensor | None, with_bias: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    of_y, rows, r, k = wide(g), wide(x), ind.values(rstd).astype(F32)[:, None], F32(x.shape[-1])
    xhat = (rows - ind.values(mean).astype(F32)[:, None] if len(mean) else rows) * r
    gw = of_y if weight is None else of_y * wide(weight)
    centred = gw - row_sums(gw) / k if len(mean) else gw
    dx = (centred - xhat * (row_sums(gw * xhat) / k)) * r
    dx = dx if g_total is None else dx + wide(g_total)
    nothing = torch.zeros(0)
    return (
        filled(ind.narrow(dx, x.dtype), x.dtype).reshape(x.shape),
        nothing if weight is None else column_sums(of_y * xhat),
        column_sums(of_y) if with_bias else nothing,
    )


def act_quantize(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, *cast: Any
) -> tuple[torch.Tensor, ...]:
    y = wide(OPS["act_quantize"].handle("reference")(x, None, kind, *PLAIN)[0])
    with np.errstate(all="ignore"):
        return quantize(fp32(y if up is None else y * wide(up), *x.shape), *cast)


@np.errstate(all="ignore")
def act_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, *cast: Any
) -> tuple[torch.Tensor, ...]:
    one = torch.ones(x.shape)
    slope = wide(OPS["act_backward"].handle("reference")(one, x, None, kind, *PLAIN)[0])
    value = wide(OPS["act_quantize"].handle("reference")(x, None, kind, *PLAIN)[0])
    of_y = wide(g)
    if up is None:
        data = (torch.zeros(shape, dtype=cast[0]) for shape in ((0,), (0, 0)))
        numbers = (torch.zeros(0) for _ in range(3))
        return *quantize(fp32(of_y * slope, *x.shape), *cast), *data, *numbers
    dx, dup = (fp32(t, *x.shape) for t in (of_y * wide(up) * slope, of_y * value))
    return *quantize(dx, *cast), *quantize(dup, cast[0], None, *cast[2:])
