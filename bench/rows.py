"""All rows: importing a rows_ module registers what it holds."""

from __future__ import annotations

from . import (
    rows_cuda_gemm,
    rows_cuda_layer,
    rows_cuda_memory,
    rows_cuda_overhead,
    rows_cuda_step,
    rows_gemm,
    rows_model,
    rows_overhead,
    rows_quantize,
    rows_step,
    rows_training,
)
from .registry import ROWS, select

MODULES = (
    *(rows_gemm, rows_quantize, rows_step, rows_model, rows_training, rows_overhead),
    *(rows_cuda_memory, rows_cuda_step, rows_cuda_gemm, rows_cuda_layer),
    rows_cuda_overhead,
)

__all__ = ["MODULES", "ROWS", "select"]
