"""All cases: importing a module registers what it holds."""

from . import gemm, gpu_gemm, gpu_layer, gpu_memory, mlp, overhead, quantize, step, training  # noqa: F401
from .registry import CASES, select

__all__ = ["CASES", "select"]
