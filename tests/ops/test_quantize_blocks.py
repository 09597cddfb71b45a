"""quantize with a scale per row or block: what is not finite, and transposed results."""

from __future__ import annotations

import math

import independent as ind
import pytest
import torch
from cases import contiguous, for_each, normal, transposed

import mixprec

BLOCKS = ("row", "block1x128", "block128x128")


def side_lengths(x: torch.Tensor, granularity: str) -> tuple[int, int]:
    rows = 128 if granularity == "block128x128" else 1
    return rows, max(x.shape[1], 1) if granularity == "row" else 128


@for_each("granularity", BLOCKS)
@for_each("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_block(
    backend: str, granularity: str, value: float
) -> None:
    x = normal((130, 257), torch.float32)
    clean = mixprec.quantize(x, "e4m3", transpose=True, granularity=granularity)
    x[129, 128] = value
    q = mixprec.quantize(x, "e4m3", transpose=True, granularity=granularity)
    height, width = side_lengths(x, granularity)
    changed = torch.zeros(q.scale_inv.shape, dtype=torch.bool)
    changed[129 // height, 128 // width] = True
    assert (q.scale_inv[changed] == 1).all()
    ind.assert_same_bits(q.scale_inv[~changed], clean.scale_inv[~changed])
    assert q.data[129, 128].float().isnan(), "hidden from whoever looks for overflows"
    assert q.data.float().isnan().sum() == 1
    assert q.data_t is not None
    assert q.data_t.float().isnan().sum() == 1
    assert q.amax.isnan() if math.isnan(value) else q.amax.isinf()


@for_each("granularity", ["tensor", *BLOCKS])
def test_t_and_transposed(backend: str, granularity: str) -> None:
    x = normal((150, 260), torch.float32)
    wide = mixprec.dequantize(mixprec.quantize(x, "e4m3", granularity=granularity))
    for transpose in (False, True):
        q = mixprec.quantize(x, "e4m3", transpose=transpose, granularity=granularity)
        t = q.t()
        assert t.shape == (260, 150)
        ind.assert_same_bits(mixprec.dequantize(t), contiguous(wide.t()), "t() keeps the values")
        ind.assert_same_bits(t.t().data, q.data)
        ind.assert_same_bits(t.t().scale_inv, q.scale_inv)
        copied = transpose and granularity in ("tensor", "block128x128")
        assert t.data.is_contiguous() == copied
        assert t.scale_inv.data_ptr() == q.scale_inv.data_ptr(), "a view"
    other = q.transposed()
    want = mixprec.quantize(transposed(x).t(), "e4m3", granularity=granularity)
    ind.assert_same_bits(mixprec.dequantize(other), mixprec.dequantize(want))
    with pytest.raises(ValueError, match=r"^Quantized\.transposed: .*transpose=True"):
        want.transposed()
    with pytest.raises(ValueError, match=r"Quantized\.t: data must be 2-D"):
        mixprec.quantize(x[0], "e4m3", granularity=granularity).t()
