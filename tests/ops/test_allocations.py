"""Memory that cannot be had."""

from __future__ import annotations

import pytest
import torch

import mixprec
from mixprec.ops._dispatch.op import OPS


def test_an_allocation_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words, and on a GPU by the class, that programs look for to use a smaller batch."""
    huge = torch.ones(1, 1).expand(1 << 40, 1 << 18)  # 2^60 bytes, if they were there
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        mixprec.quantize(huge, mixprec.E4M3)

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA out of memory for a result of mixprec")

    monkeypatch.setattr(OPS["amax"], "_chosen", {(None, torch.device("cpu")): ("cpu", fail)})
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        mixprec.amax(torch.ones(3))
