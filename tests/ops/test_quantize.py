"""quantize, the public function, and what it returns. test_values.py has the values."""

from __future__ import annotations

import independent as ind
import numpy as np
import pytest
import torch
from cases import contiguous, for_each, normal, transposed

import mixprec
from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference.scale_layout import GRANULARITIES


@for_each("granularity", GRANULARITIES)
@for_each("transpose", [False, True])
def test_fields(backend: str, transpose: bool, granularity: str) -> None:
    """A scale as a number or a tensor; an input that is left alone; None for what is not there."""
    x = normal((5, 130), torch.bfloat16)
    before, fp8 = ind.bits(x).copy(), torch.float8_e5m2
    scales = (12.5, torch.tensor(12.5), torch.tensor([12.5])) if granularity == "tensor" else ()
    for scale in (None, *scales):
        how = {"granularity": granularity, "power_of_two_scale": False}
        q = mixprec.quantize(x, "e5m2", scale, transpose, **how)
        given = None if scale is None else torch.tensor(12.5)
        data, data_t, scale_inv, scale_inv_t, amax = OPS["quantize"](
            x, fp8, given, transpose, granularity, False
        )
        own = transpose and granularity != "tensor"
        want = (data, scale_inv, amax, data_t if transpose else None, scale_inv_t if own else None)
        for got, field in zip(q[:5], want, strict=True):
            assert (got is None) == (field is None)
            if field is not None:
                ind.assert_same_bits(got, field)
        assert (q.fmt.name, q.granularity, q.data.dtype) == ("e5m2", granularity, fp8)
        ind.assert_same_bits(mixprec.amax(x), q.amax)
        back = OPS["dequantize"](q.data, q.scale_inv, torch.float16)
        ind.assert_same_bits(mixprec.dequantize(q, torch.float16), back)
    assert np.array_equal(ind.bits(x), before)


@for_each("granularity", GRANULARITIES)
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


def test_one_compiled_function_reads_the_scale_of_each_call(backend: str) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = mixprec.quantize(x, "e4m3", scale)
        return q.scale_inv, mixprec.dequantize(q)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, scale = torch.full((3, 4), 7.0), torch.zeros(())
    assert compiled(x, scale)[0].item() == 2.0**-6  # not initialised: 448 / 7 = 64
    assert compiled(x, scale.fill_(2.0))[0].item() == 0.5
    assert torch.equal(compiled(x, scale)[1], x)
    assert compiled(x, scale.fill_(-2.0))[1].isnan().all(), "the sign is lost"
