"""A scale that nobody may read before the kernel does: out of range, every result is NaN."""

from __future__ import annotations

import math

import pytest
import torch

import mixprec
from mixprec import formats


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "bf16"])
@pytest.mark.parametrize("scale", [-2.0, math.inf, -math.inf, math.nan, 2.0**127, 2.0**-127])
def test_out_of_range_is_nan_everywhere(scale: float, fmt: str) -> None:
    x = torch.tensor([[1.0, -2.0], [0.0, 448.0]])
    given = torch.tensor(scale)
    data, data_t, scale_inv, _, amax = torch.ops.mixprec.quantize(
        x, formats.parse(fmt).dtype, given, True, "tensor", True
    )
    assert data.float().isnan().all()
    assert data_t.float().isnan().all()
    assert scale_inv.isnan()
    assert amax == 448.0
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        mixprec.quantize(x, fmt, given)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_does_not_lose_the_sign() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return mixprec.dequantize(mixprec.quantize(x, mixprec.E4M3, scale))

    x = torch.tensor([1.0, -2.0])
    assert torch.equal(cast(x, torch.tensor(2.0)), x)
    assert cast(x, torch.tensor(-2.0)).isnan().all()
