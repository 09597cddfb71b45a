"""All cases: importing a module registers what it holds."""

from . import (  # noqa: F401
    attention,
    fused,
    gemm,
    gpt,
    gpu_fused,
    gpu_gemm,
    gpu_layer,
    gpu_memory,
    head,
    mlp,
    models,
    overhead,
    pack,
    quantize,
    quantize_mx,
    simulate,
    step,
    training,
)
from .registry import CASES, select

__all__ = ["CASES", "select"]
