"""Memory that cannot be had."""

from __future__ import annotations

import pytest
import torch

import mixprec
from mixprec.ops._dispatch.op import OPS


def test_an_allocation_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words, and on a GPU by the class, that programs look for to use a smaller batch."""
    huge = torch.ones(1, 1, dtype=torch.bfloat16).expand(1 << 30, 1)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        mixprec.gemm(huge, huge.t(), out_dtype=torch.float32)  # 2^62 bytes

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA out of memory for a result of mixprec")

    monkeypatch.setattr(OPS["amax"], "_chosen", {(None, torch.device("cpu")): ("cpu", fail)})
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        mixprec.amax(torch.ones(3))
