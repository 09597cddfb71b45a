"""What gemm has to give: exact products of decoded values, and the bound where they are rounded."""

from __future__ import annotations

import independent as ind
import numpy as np
import pytest
import torch
from cases import FP8, name

from mixprec.testing import assert_close, tolerance

Pair = tuple[torch.dtype, torch.dtype]
PAIRS = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    *((a, b) for a in FP8 for b in FP8),
)
formats = pytest.mark.parametrize("pair", PAIRS, ids=name)


def product(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """a @ b of the decoded values in FP64."""
    with np.errstate(invalid="ignore"):
        return ind.values(a) @ ind.values(b)


def check_exact(c: torch.Tensor, want: np.ndarray, what: str = "gemm") -> None:
    """c is `want` after one rounding; the sign of a zero is left open."""
    pattern = ind.narrow(want, c.dtype)
    negative_zero = pattern == 1 << (8 * pattern.itemsize - 1)
    ind.assert_bits(c + 0.0, np.where(negative_zero, 0, pattern).astype(pattern.dtype), what)


def check_close(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, extra: float = 1.0) -> None:
    """c is a @ b * extra within the bound of FP32 accumulation."""
    a64, b64 = torch.from_numpy(ind.values(a) * extra), torch.from_numpy(ind.values(b))
    want = a64 @ b64
    assert_close(c, want, tolerance(want, a64, b64, c.dtype))
