"""act_quantize and norm_quantize: what the public functions compute, cast as by quantize, and rows
that are not finite. test_values.py has the values."""

from __future__ import annotations

import math

import independent as ind
import torch
from cases import for_each, normal
from emulated.values.test_fused import PLAIN

import mixprec
from mixprec.ops import act_quantize, norm_quantize
from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference import scale_layout
from mixprec.ops.norm_quantize import norm_quantize_op


def same_quantized(got: mixprec.Quantized, want: mixprec.Quantized) -> None:
    assert got[5:] == want[5:]
    for g, w in zip(got[:5], want[:5], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            ind.assert_same_bits(g, w)


def test_public_functions(backend: str) -> None:
    x, other = normal((7, 130), torch.bfloat16), normal((7, 130), torch.bfloat16, seed=1)
    weight, bias = normal((130,), torch.float32, seed=2), normal((130,), torch.float32, seed=3)
    activated = OPS["act_quantize"](x, other, "gelu", *PLAIN)[0]
    normed = OPS["norm_quantize"](x, other, weight, bias, 1e-3, False, *PLAIN)[0]
    for granularity in scale_layout.FUSED:
        cast = {"transpose": True, "granularity": granularity}
        q = act_quantize(x, "e4m3", other, kind="gelu", **cast)
        same_quantized(q, mixprec.quantize(activated, "e4m3", **cast))
        q, total = norm_quantize(x, "e5m2", weight, bias, eps=1e-3, residual=other, **cast)
        same_quantized(q, mixprec.quantize(normed, "e5m2", **cast))
        ind.assert_same_bits(total, (x.float() + other.float()).bfloat16())
    y = OPS["act_quantize"](x, None, "silu", *PLAIN)[0]
    ind.assert_same_bits(act_quantize(x, "bf16", scale=2.0).data, (y * 2).bfloat16())
    y = OPS["norm_quantize"](x, None, None, None, 1e-5, True, *PLAIN)[0]
    q, total = norm_quantize(x, "bf16", subtract_mean=True, scale=2.0)
    assert total is x
    ind.assert_same_bits(q.data, (y * 2).bfloat16())


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
