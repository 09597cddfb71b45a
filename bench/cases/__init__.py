"""All cases: importing a module registers what it holds."""

from . import (  # noqa: F401
    fused,
    gemm,
    gpu_gemm,
    gpu_layer,
    gpu_memory,
    mlp,
    overhead,
    pack,
    quantize,
    step,
    training,
)
from .registry import CASES, select

__all__ = ["CASES", "select"]
