"""act_quantize and norm_quantize, the public functions: what they compute, cast as by quantize."""

from __future__ import annotations

import independent as ind
import torch
from cases import normal
from definitions_fused import PLAIN

import mixprec
from mixprec.ops import act_quantize, norm_quantize
from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference import scale_layout


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
