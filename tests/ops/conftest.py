"""Fixtures: a number of threads; those of the tests of dispatch, which play a GPU on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mixprec.ops._dispatch import gemm_table, library
from mixprec.ops._dispatch.op import OPS


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is chosen, compared or logged yet."""
    for op in OPS.values():
        for name in ("_chosen", "_able", "agreed", "left_out"):
            monkeypatch.setattr(op, name, {})
        monkeypatch.setattr(op, "_warned", False)
    return monkeypatch


@pytest.fixture
def gpu(fresh: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As on a GPU of compute capability 9.0 with everything built, without an entry of the user's.
    The tensors are on the CPU, and what is chosen for them is looked at, not run."""
    fresh.setattr(library, "TRITON_ERROR", None)
    fresh.setattr(library, "CUDA_ERROR", None)
    fresh.setattr(library, "CUDA_ARCHS", "8.0;9.0a;12.0+PTX")
    fresh.setattr(library, "has_cuda_kernel", lambda op: True)
    fresh.setattr(library, "capability", lambda index: (9, 0))
    fresh.setenv("MIXPREC_TUNED", "/nowhere/gemm_table.json")
    fresh.setattr(gemm_table, "SHIPPED", Path("/nowhere/gemm_table.json"))
    gemm_table.table.cache_clear()
    yield fresh
    gemm_table.table.cache_clear()
