"""Calls of gemm: those that torch's own can do exactly, and those that it cannot."""

from __future__ import annotations

from typing import Any

import torch
from cases import FP8, small_integers

E4M3, E5M2 = FP8
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ONE = torch.ones(())


def operands(
    dtype: torch.dtype, m: int = 32, n: int = 48, k: int = 64, b_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [M, K] with K contiguous, b [K, N] with K contiguous."""
    return small_integers((m, k), dtype), small_integers((n, k), b_dtype or dtype).t()


def arguments(
    a: Any, b: Any, out: torch.dtype, a_inv: Any = None, b_inv: Any = None, bias: Any = None
) -> tuple[Any, ...]:
    return a, b, a_inv, b_inv, bias, out, False


ROW, COLUMN = torch.ones(32, 1), torch.ones(1, 48)
A8, B8 = operands(E4M3)
CAN: dict[str, tuple[Any, ...]] = {
    "fp16": arguments(*operands(HALF), HALF),
    "bf16": arguments(*operands(BF16), BF16),
    "bf16 of any size": arguments(*operands(BF16, 3, 5, 7), BF16),
    "bf16 of any strides": arguments(operands(BF16)[0], operands(BF16)[1].contiguous(), BF16),
    "bf16 to fp32": arguments(*operands(BF16), FP32),
    "bf16 bias": arguments(*operands(BF16), BF16, bias=torch.ones(48).bfloat16()),
    "K = 0": arguments(torch.ones(4, 0).half(), torch.ones(0, 5).half(), HALF),
    "fp8": arguments(A8, B8, BF16, ONE, ONE),
    "fp8 to fp32, no scale": arguments(A8, B8, FP32),
    "fp8 to fp16": arguments(A8, B8, HALF, ONE.view(1, 1), None),
    "fp8 with a bias": arguments(A8, B8, BF16, ONE, ONE, torch.ones(48).bfloat16()),
    "fp8 that starts anywhere": arguments(
        *(operands(E4M3, k=80)[0][:, 8:72], operands(E4M3, k=80)[1][3:67], BF16, ONE, ONE)
    ),
    "e5m2 x e4m3": arguments(*operands(E5M2, b_dtype=E4M3), BF16, ONE, ONE),
    "fp8 by rows": arguments(A8, B8, BF16, ROW, COLUMN),
    "fp8, one row": arguments(A8[:1], B8, BF16, 2 * ROW[:1], COLUMN),
    "fp8, one row, one scale": arguments(A8[:1], B8, BF16, 2 * ONE, COLUMN),
}
BIAS, STRIDED = torch.ones(48), torch.ones(96).bfloat16()[::2]
B5, ROWS = operands(E5M2)[1], torch.ones(32, 2)
LINES = small_integers((32, 72), E4M3)[:, :64]
PARTS = torch.ones(32, 2), torch.ones(2, 48)
SCALES_OF_BLOCKS = torch.ones(32, 2), torch.ones(2, 1)
SQUARE = operands(E4M3, 128, 128, 640)
SCALES = 2.0 ** (torch.arange(640) % 7).view(128, 5), 2.0 ** torch.arange(5.0).view(1, 5)
BLOCKS: dict[str, tuple[Any, ...]] = {  # on Hopper
    "1x128": arguments(*SQUARE, FP32, SCALES[0], SCALES[0].t()),
    "128x128 of b": arguments(*SQUARE, BF16, SCALES[0], SCALES[1].t(), torch.ones(128).bfloat16()),
    "128x128 of a": arguments(*SQUARE, BF16, SCALES[1], SCALES[0].t()),
    "128x128, 32 rows": arguments(SQUARE[0][:32], SQUARE[1], BF16, SCALES[0][:32], SCALES[1].t()),
}
CANNOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "a scale": (arguments(*operands(BF16), BF16, ONE), "no scales for bfloat16"),
    "bias of another dtype": (arguments(*operands(BF16), BF16, bias=BIAS), "takes a bias only"),
    "bias to fp32": (arguments(*operands(HALF), FP32, bias=BIAS), "takes a bias only"),
    "fp16 to bf16": (arguments(*operands(HALF), BF16), "float16 operands no bfloat16 result"),
    "e5m2 x e5m2": (arguments(*operands(E5M2), BF16, ONE, ONE), "float8_e5m2 by float8_e5m2"),
    "odd K": (arguments(*operands(E4M3, k=40), BF16, ONE, ONE), "multiples of 16, got K = 40"),
    "odd N": (arguments(*operands(E4M3, n=50), BF16, ONE, ONE), "multiples of 16, .*N = 50"),
    "empty": (arguments(*operands(E4M3, m=0), BF16, ONE, ONE), "multiples of 16"),
    "b by rows": (arguments(A8, B8.contiguous(), BF16, ONE, ONE), "K next to each other"),
    "a by columns": (arguments(A8.t().contiguous().t(), B8, BF16, ONE, ONE), "K next to"),
    "odd line": (arguments(LINES, B8, BF16, ONE, ONE), "lines 16 bytes apart"),
    "fp32 bias": (arguments(A8, B8, BF16, ONE, ONE, BIAS), "no float32 bias for a bfloat16 res"),
    "bias to an fp32 result": (arguments(A8, B8, FP32, ONE, ONE, BIAS), "bias for a float32 res"),
    "strided bias": (arguments(A8, B8, BF16, ONE, ONE, STRIDED), "contiguous bias"),
    "mixed granularities": (arguments(A8, B8, BF16, ROW, ONE), "one granularity"),
    "two in squares": (arguments(*SQUARE, BF16, SCALES[1], SCALES[1].t()), "one operand also per"),
    "blocks in part": (arguments(*operands(E4M3, k=160), BF16, *PARTS), "whole blocks"),
    "squares in part": (arguments(*operands(E4M3, k=256), BF16, *SCALES_OF_BLOCKS), "whole blocks"),
    "blocks of 6 rows": (
        arguments(SQUARE[0][:6], SQUARE[1], BF16, SCALES[0][:6], SCALES[0].t()),
        "multiple of 4",
    ),
    "blocks, e5m2 b": (
        arguments(SQUARE[0], operands(E5M2, 128, 128, 640)[1], BF16, SCALES[0], SCALES[0].t()),
        "blocks for float8_e4m3fn",
    ),
    "rows to fp32": (arguments(A8, B8, FP32, ROW, COLUMN), "bfloat16 result"),
    "rows, e5m2 b": (arguments(A8, B5, BF16, ROW, COLUMN), "float8_e4m3fn b"),
    "strided scales": (arguments(A8, B8, BF16, ROWS[:, :1], COLUMN), "contiguous scales"),
}
