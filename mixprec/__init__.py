"""mixprec: mixed-precision training for PyTorch, with its own kernels."""

from . import distributed, functional, nn, optim, scaling
from .amp.grad_scaler import GradScaler
from .availability import is_available, why_not
from .checkpoint import load_checkpoint, save_checkpoint
from .diagnostics import stats
from .diagnostics.compare import compare
from .diagnostics.memory_report import MemoryReport, memory_report
from .diagnostics.report import Report
from .formats import BF16, E4M3, E5M2, FP16, Format
from .freeze import freeze
from .lean import lean
from .memory import compress_saved
from .nn import filters
from .nn.autocast import autocast
from .nn.cast import cast_parameters
from .nn.convert import convert, convert_to_float8_training
from .nn.reuse_weights import reuse_weights
from .nn.unconvert import unconvert
from .ops import (
    act_quantize,
    amax,
    dequantize,
    gemm,
    gemm_accumulate_,
    norm_quantize,
    quantize,
    simulate,
    unscale_,
    use_backend,
)
from .quantized import Quantized
from .recipes import Recipe
from .scaling import update_scales

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "Format",
    "GradScaler",
    "MemoryReport",
    "Quantized",
    "Recipe",
    "Report",
    "act_quantize",
    "amax",
    "autocast",
    "cast_parameters",
    "compare",
    "compress_saved",
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
    "lean",
    "load_checkpoint",
    "memory_report",
    "nn",
    "norm_quantize",
    "optim",
    "quantize",
    "reuse_weights",
    "save_checkpoint",
    "scaling",
    "simulate",
    "stats",
    "unconvert",
    "unscale_",
    "update_scales",
    "use_backend",
    "why_not",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """For completion: the public names, without the modules that make them."""
    return [*__all__, "__doc__", "__version__"]
