"""Small inputs of every op, on which a GPU kernel is compared with the reference before use.

An example has a twin that differs in its sizes alone: those of one are multiples of 16, for which a
kernel moves 16 bytes at a time, those of the other are odd. Both are more than one tile or block of
any kernel, and no whole number of them. Every rounding is defined, so results are compared exactly;
operands of a GEMM are small integers, whose sums are exact in FP32.
"""

from .blocks import dequantize_mx, pack, quantize_mx, unpack
from .casts import amax, dequantize, quantize
from .fused import (
    act_backward,
    act_quantize,
    cross_entropy,
    cross_entropy_backward,
    norm_backward,
    norm_quantize,
)
from .grouped import gemm_grouped, gemm_grouped_accumulate
from .lists import grad_stats, unscale, update
from .products import (
    attention,
    attention_backward,
    gemm,
    gemm_accumulate,
    gemm_simulated,
    rotary,
)
from .scales import clip_coef, inv_scale, scale_from_amax, update_delayed_scales, update_scale

__all__ = [
    "act_backward", "act_quantize", "amax", "attention", "attention_backward", "clip_coef",
    "cross_entropy", "cross_entropy_backward", "dequantize", "dequantize_mx",
    "gemm", "gemm_accumulate", "gemm_grouped", "gemm_grouped_accumulate", "gemm_simulated",
    "grad_stats", "inv_scale", "norm_backward",
    "norm_quantize", "pack", "quantize", "quantize_mx", "rotary",
    "scale_from_amax", "unpack", "unscale", "update", "update_delayed_scales", "update_scale",
]  # fmt: skip
