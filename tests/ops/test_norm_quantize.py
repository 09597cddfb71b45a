"""norm_quantize and norm_backward: the sums' order and the norms. test_fused_casts.py has the
casts."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import for_each, normal
from test_fused_casts import PLAIN

from mixprec.ops.norm_quantize import norm_backward_op, norm_quantize_op

F32 = np.float32


def row_sum(x: np.ndarray) -> F32:
    """The sum of a row in the defined order, one FP32 addition after the other."""
    partial = [F32(0)] * 256
    for i, value in enumerate(x):
        partial[i % 256] = partial[i % 256] + value
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [a + b for a, b in zip(partial[:half], partial[half:], strict=True)]
    return partial[0]


def column_sums(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1], F32)
    for band in range(0, len(x), 64):
        of_band = np.zeros(x.shape[1], F32)
        for row in x[band : band + 64]:
            of_band = of_band + row
        total = total + of_band
    return total


@for_each("subtract_mean, k", [(mean, k) for mean in (True, False) for k in (1, 255, 256, 700)])
def test_operation_by_operation(backend: str, subtract_mean: bool, k: int) -> None:
    """Against NumPy, bit for bit."""
    x, g, g_total = (normal((70, k), torch.float32, seed=i) + (i == 0) for i in range(3))
    weight, bias = normal((k,), torch.float32, seed=4), normal((k,), torch.float32, seed=5)
    y, *_, mean, rstd = norm_quantize_op(x, None, weight, bias, 1e-5, subtract_mean, *PLAIN)
    rows, w, b, of_y = (t.numpy() for t in (x, weight, bias, g))
    want, dx = np.empty_like(rows), np.empty_like(rows)
    products = np.empty_like(rows)
    for i, row in enumerate(rows):
        average = row_sum(row) / F32(k) if subtract_mean else F32(0)
        centred = row - average
        variance = row_sum(centred * centred) / F32(k)
        r = F32(1) / np.sqrt(variance + F32(1e-5))
        assert rstd[i].item() == r
        assert not subtract_mean or mean[i].item() == average
        xhat = centred * r
        want[i] = xhat * w + b
        gw = of_y[i] * w
        c1 = row_sum(gw * xhat) / F32(k)
        c2 = row_sum(gw) / F32(k) if subtract_mean else F32(0)
        dx[i] = ((gw - c2) - xhat * c1) * r + g_total.numpy()[i]
        products[i] = of_y[i] * xhat
    ind.assert_bits(y, want.view(np.uint32))
    got = norm_backward_op(g, x, weight, mean, rstd, g_total, True)
    for name, have, need in zip(
        ("dx", "dweight", "dbias"), got, (dx, column_sums(products), column_sums(of_y)), strict=True
    ):
        ind.assert_bits(have, need.view(np.uint32), name)


@for_each("subtract_mean", [True, False])
def test_against_torch_in_fp64(backend: str, subtract_mean: bool) -> None:
    x, g, res, of_total = (normal((33, 300), torch.float32, seed=i) for i in range(4))
    weight, bias = normal((300,), torch.float32, seed=5), normal((300,), torch.float32, seed=6)
    y, *_, total, mean, rstd = norm_quantize_op(x, res, weight, bias, 1e-3, subtract_mean, *PLAIN)
    leaves = [t.double().requires_grad_() for t in (total, weight, bias)]
    if subtract_mean:
        want = torch.nn.functional.layer_norm(leaves[0], (300,), *leaves[1:], 1e-3)
    else:
        want = torch.nn.functional.rms_norm(leaves[0], (300,), leaves[1], 1e-3) + leaves[2]
    ((want * g).sum() + (leaves[0] * of_total).sum()).backward()
    torch.testing.assert_close(total, x + res, rtol=0, atol=0)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=2e-6)
    got = norm_backward_op(g, total, weight, mean, rstd, of_total, True)
    for have, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(have.double(), leaf.grad, rtol=2e-6, atol=2e-5)


@for_each("subtract_mean", [True, False])
def test_special_values(backend: str, subtract_mean: bool) -> None:
    """NaN and Inf make their row NaN, and no other; a constant row is 0 (LayerNorm) or finite."""
    x = normal((6, 300), torch.float32)
    x[1, 299], x[3, 0], x[4] = math.inf, math.nan, 0.0
    data, _, scale_inv, _, amax, *_ = norm_quantize_op(
        x, None, None, None, 1e-5, subtract_mean, torch.float8_e4m3fn, None, False, "row", True
    )
    bad = torch.tensor([False, True, False, True, False, False])
    assert torch.equal(data.float().isnan().any(1), bad)
    assert (data[4].float() == 0).all()
    assert scale_inv[[1, 3, 4], 0].tolist() == [1.0] * 3
    assert amax.isnan()
    large = torch.full((2, 5), 3e38)  # its sum and its squares overflow
    y = norm_quantize_op(large, None, None, None, 1e-5, subtract_mean, *PLAIN)[0]
    assert y.isnan().all()
