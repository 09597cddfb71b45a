"""mixprec: mixed-precision training for PyTorch, from its own kernels."""

from . import distributed, filters, functional, nn, optim, scaling, stats
from .autocast import autocast
from .availability import is_available, why_not
from .checkpoint import load_checkpoint, save_checkpoint
from .compare import compare
from .convert import cast_parameters, convert, convert_to_float8_training
from .formats import BF16, E4M3, E5M2, FP16, Format
from .freeze import freeze
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
from .reuse import reuse_weights
from .scaling import update_scales

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
    "autocast",
    "cast_parameters",
    "compare",
    "convert",
    "convert_to_float8_training",
    "dequantize",
    "distributed",
    "filters",
    "freeze",
    "functional",
    "gemm",
    "gemm_accumulate_",
    "is_available",
    "load_checkpoint",
    "nn",
    "optim",
    "quantize",
    "reuse_weights",
    "save_checkpoint",
    "scaling",
    "stats",
    "unscale_",
    "update_scales",
    "use_backend",
    "why_not",
]

__version__ = "0.1.0"
