"""All cases: importing a module registers what it holds."""

from . import (  # noqa: F401
    attention,
    fused,
    gemm,
    gpt,
    gpu_gemm,
    head,
    models,
    overhead,
    pack,
    quantize,
    quantize_mx,
    step,
)
from .registry import CASES, select

__all__ = ["CASES", "select"]
