"""mixprec: mixed-precision training for PyTorch, from its own kernels."""

from . import distributed, functional, nn, optim
from .checkpoint import load_checkpoint, save_checkpoint
from .compare import compare
from .convert import cast_parameters, convert, convert_to_float8_training
from .formats import BF16, E4M3, E5M2, FP16, Format
from .grad_scaler import GradScaler
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
from .recipes import Recipe
from .report import Report

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "Format",
    "GradScaler",
    "Quantized",
    "Recipe",
    "Report",
    "amax",
    "cast_parameters",
    "compare",
    "convert",
    "convert_to_float8_training",
    "dequantize",
    "distributed",
    "functional",
    "gemm",
    "gemm_accumulate_",
    "load_checkpoint",
    "nn",
    "optim",
    "quantize",
    "save_checkpoint",
    "unscale_",
    "use_backend",
]

__version__ = "0.1.0"
