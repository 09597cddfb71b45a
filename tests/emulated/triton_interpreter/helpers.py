"""What the tests in Triton's interpreter share.

The interpreter is chosen by TRITON_INTERPRET=1 when triton is imported, so these modules need a
process of their own: `make test-kernels` has one pytest run for this folder and one for the rest.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import independent as ind
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    reason = "runs under TRITON_INTERPRET=1, which make test-kernels sets"
    pytest.skip(reason, allow_module_level=True)

import triton
import triton.language as tl
from emulated.ops import launcher, reference

__all__ = ["INF", "NAN", "agree", "f32", "no_warnings", "same_bits", "tensors", "tl", "triton"]

INF, NAN = math.inf, math.nan
# A kernel that computes Inf or NaN is not in error; NumPy, underneath, warns of it.
no_warnings = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float32)


def tensors(values: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [t for value in values for t in tensors(value)]
    return []


def same_bits(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), label
    if got.is_floating_point():
        ind.assert_same_bits(got, want, label)
    else:
        assert torch.equal(got, want), label


def agree(op: str, make: Callable[[], list[Any]]) -> None:
    """Results and arguments after the call are those of the reference, in every bit."""
    ours, same = make(), make()
    got = tensors([launcher(op)(*ours), ours])
    want = tensors([reference(op)(*same), same])
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same_bits(g, w, f"{op}: tensor {i}")
