"""mixprec: mixed-precision training for PyTorch, with its own kernels."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import _originals  # noqa: F401  (before other libraries can replace parts of torch)
from .formats import BF16, E4M3, E5M2, FP16, Format
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

if TYPE_CHECKING:  # what `__getattr__` imports
    from . import distributed, filters, functional, nn, optim, scaling, stats
    from .amp.grad_scaler import GradScaler
    from .availability import is_available, why_not
    from .checkpoint import load_checkpoint, save_checkpoint
    from .cuda_graph import graphed
    from .diagnostics.audit import Audit, audit, bisect
    from .diagnostics.audit.diff import Diff
    from .diagnostics.invariance import Invariance, invariance
    from .diagnostics.log_probs import LogProbGap, log_prob_gap
    from .diagnostics.memory_report import MemoryReport, memory_report
    from .diagnostics.outliers import choose_outliers
    from .diagnostics.plan import plan
    from .diagnostics.plan.result import Plan
    from .frozen import freeze
    from .lean_training import lean
    from .memory.compress_saved import compress_saved
    from .nn.autocast import autocast
    from .nn.cast import cast_parameters
    from .nn.convert import convert, convert_to_float8_training, unconvert
    from .nn.gather import gather_in_fp8
    from .nn.reuse_weights import reuse_weights
    from .recipes import Recipe
    from .scaling import update_scales

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "Audit",
    "Diff",
    "Format",
    "GradScaler",
    "Invariance",
    "LogProbGap",
    "MemoryReport",
    "Plan",
    "Quantized",
    "Recipe",
    "act_quantize",
    "amax",
    "audit",
    "autocast",
    "bisect",
    "cast_parameters",
    "choose_outliers",
    "compress_saved",
    "convert",
    "convert_to_float8_training",
    "dequantize",
    "distributed",
    "filters",
    "freeze",
    "functional",
    "gather_in_fp8",
    "gemm",
    "gemm_accumulate_",
    "graphed",
    "invariance",
    "is_available",
    "lean",
    "load_checkpoint",
    "log_prob_gap",
    "memory_report",
    "nn",
    "norm_quantize",
    "optim",
    "plan",
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

_MODULES = (
    *("amp", "availability", "checkpoint", "diagnostics", "distributed", "filters", "functional"),
    *("grad_report", "memory", "nn", "optim", "recipes", "scaling", "stats", "testing"),
)
_DEFINED_IN = {
    "Audit": "diagnostics.audit",
    "Diff": "diagnostics.audit.diff",
    "GradScaler": "amp.grad_scaler",
    "Invariance": "diagnostics.invariance",
    "LogProbGap": "diagnostics.log_probs",
    "MemoryReport": "diagnostics.memory_report",
    "Plan": "diagnostics.plan.result",
    "Recipe": "recipes",
    "audit": "diagnostics.audit",
    "autocast": "nn.autocast",
    "bisect": "diagnostics.audit",
    "cast_parameters": "nn.cast",
    "choose_outliers": "diagnostics.outliers",
    "compress_saved": "memory.compress_saved",
    "convert": "nn.convert",
    "convert_to_float8_training": "nn.convert",
    "freeze": "frozen",
    "gather_in_fp8": "nn.gather",
    "graphed": "cuda_graph",
    "invariance": "diagnostics.invariance",
    "is_available": "availability",
    "lean": "lean_training",
    "load_checkpoint": "checkpoint",
    "log_prob_gap": "diagnostics.log_probs",
    "memory_report": "diagnostics.memory_report",
    "plan": "diagnostics.plan",
    "reuse_weights": "nn.reuse_weights",
    "save_checkpoint": "checkpoint",
    "unconvert": "nn.convert",
    "update_scales": "scaling",
    "why_not": "availability",
}

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        """Import what `import mixprec` leaves out, which takes as long again, when first used."""
        if name in _MODULES:
            value = import_module(f".{name}", __name__)
        elif name in _DEFINED_IN:
            value = getattr(import_module(f".{_DEFINED_IN[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """For completion: the public names, without the modules that make them."""
    return [*__all__, "__doc__", "__version__"]
