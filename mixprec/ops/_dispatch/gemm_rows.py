"""Which GEMM is fastest where: measured rows, per architecture, operand family and size class.

The choice where there is no row: the vendor's, as long as one call of it does the job exactly.
`python -m mixprec.bench tune` measures rows for the GPU at hand; they go before the ones here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

FAMILIES = ("fp16", "bf16", "fp8")  # of the operands
SIZES = ("thin", "unaligned", "small", "medium", "large")
BACKENDS = ("cuda", "triton", "vendor")


class Row(NamedTuple):
    """`backend` was the fastest for a family and size class on a GPU of this architecture."""

    arch: str  # compute capability: "9.0"
    family: str
    size: str
    backend: str
    gpu: str
    date: str
    speedup: float  # over the next best, geometric mean over the shapes measured

    @property
    def key(self) -> tuple[str, str, str]:
        return self.arch, self.family, self.size


def family(dtype: torch.dtype) -> str:
    return "fp16" if dtype == torch.float16 else "bf16" if dtype == torch.bfloat16 else "fp8"


def size_class(m: int, n: int, k: int, itemsize: int) -> str:
    """The class of a [M, K] x [K, N] product of operands of `itemsize` bytes.

    thin: 64 rows or columns at most. unaligned: rows that do not start on 16 bytes. small: up to
    1448 cubed; medium: up to 4096 cubed; large: above.
    """
    if m <= 64 or n <= 64:
        return "thin"
    if (n * itemsize) % 16 or (k * itemsize) % 16:
        return "unaligned"
    products = m * n * k
    return "small" if products <= 1448**3 else "medium" if products <= 4096**3 else "large"


def parse(entries: Any) -> dict[tuple[str, str, str], Row]:
    """Rows from plain values, as JSON holds them; ValueError for what is no row."""
    if not isinstance(entries, list):
        raise ValueError("the rows must be a list")
    rows = {}
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != set(Row._fields):
            raise ValueError(f"a row must have {', '.join(Row._fields)}, got {entry!r}")
        row = Row(**entry)
        for value, known in ((row.family, FAMILIES), (row.size, SIZES), (row.backend, BACKENDS)):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if not isinstance(row.arch, str):
            raise ValueError(f"arch must be a text such as '9.0', got {row.arch!r}")
        rows[row.key] = row
    return rows


ROWS: dict[tuple[str, str, str], Row] = parse([])  # nothing is measured yet
