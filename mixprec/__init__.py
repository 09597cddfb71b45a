"""mixprec: mixed-precision training for PyTorch, from its own kernels."""

from .formats import BF16, E4M3, E5M2, FP16, Format
from .ops import (
    amax,
    dequantize,
    gemm,
    gemm_accumulate_,
    quantize,
    unscale_,
    use_backend,
)
from .quantized import Quantized

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "Format",
    "Quantized",
    "amax",
    "dequantize",
    "gemm",
    "gemm_accumulate_",
    "quantize",
    "unscale_",
    "use_backend",
]

__version__ = "0.1.0"
