"""quantize_mx: block formats, MX and NVFP4."""

from __future__ import annotations

import torch
from cases import for_each, normal

from mixprec.ops._dispatch.block_formats import BLOCK_FORMATS
from mixprec.ops.dequantize_mx import run as dequantize_mx
from mixprec.ops.quantize_mx import run as quantize_mx


@for_each("fmt", BLOCK_FORMATS)
def test_the_error_is_that_of_the_elements(fmt: str) -> None:
    x = normal((70, 101), torch.float32)
    data, data_t, scale, scale_t, tensor_scale, _ = quantize_mx(x, fmt, "rceil", True, None)
    of_tensor = tensor_scale if tensor_scale.dim() == 0 else None
    for y, codes, scales in ((x, data, scale), (x.t(), data_t, scale_t)):
        got = dequantize_mx(codes, scales, of_tensor, fmt, y.shape[1], torch.float32)
        assert (got - y).norm() < BLOCK_FORMATS[fmt].element.eps / 3.3 * y.norm()
