"""norm_quantize and norm_backward: the norms of torch, and what is not finite."""

from __future__ import annotations

import math

import torch
from cases import for_each, normal
from definitions_fused import PLAIN

from mixprec.ops.norm_quantize import norm_backward_op, norm_quantize_op


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
