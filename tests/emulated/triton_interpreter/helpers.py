"""What the tests in Triton's interpreter share.

The interpreter is chosen by TRITON_INTERPRET=1 when triton is imported, so these modules need a
process of their own: `make test-kernels` has one pytest run for them and one for the rest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
if os.environ.get("TRITON_INTERPRET") != "1":
    reason = "runs under TRITON_INTERPRET=1, which make test-kernels sets"
    pytest.skip(reason, allow_module_level=True)

import triton
import triton.language as tl
from emulated.agreement import OPS, TRITON, launcher
from triton.runtime import interpreter

from mixprec.ops._dispatch import backends
from mixprec.triton_kernels import configs, gemm

__all__ = ["SETTINGS", "choose", "ops_on_the_cpu", "tl", "triton"]

# Tiles smaller than those in use, so that small problems have several tiles and rounds; 256 is
# stored in two halves. The GPU's size, the parts of K (at K = 300 some without any chunk of their
# own), whether TMA is used, and whether fp8 goes into tl.dot as it is, or decoded in integers.
SETTINGS = {
    "square": (configs.Config(32, 32, 64, 4, 2, group=2), 3, 1, False),
    "tall": (configs.Config(64, 16, 128, 4, 2, group=1), 7, 3, True),
    "wide": (configs.Config(16, 256, 32, 4, 2, group=3, tma=True), 1, 1, False),
    "tma": (configs.Config(32, 32, 64, 4, 2, group=2, tma=True), 3, 5, True),
}


# The interpreter puts its functions into triton.language at each call of a jitted function, also by
# a kernel, which takes longer than to run them: here once for each function.
_replace = interpreter._patch_lang


@functools.cache
def _replace_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
    _replace(function)
    return interpreter._LangPatchScope()  # that restores nothing


interpreter._patch_lang = _replace_once


def choose(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """That setting for all products of the test."""
    config, programs, parts, native_fp8 = SETTINGS[setting]
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, programs))
    monkeypatch.setattr(gemm, "pick", lambda *_: config)
    monkeypatch.setattr(gemm, "split_k", lambda *_: parts)
    if native_fp8:  # the interpreter has no correct bf16
        monkeypatch.setattr(gemm, "soft_cast", lambda _, a, b: a.itemsize != 1)


def ops_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The _triton ops take CPU tensors, which only the interpreter can make of use."""
    registered = torch.library.Library("mixprec", "IMPL")
    for op in TRITON:
        registered.impl(OPS[op].variant_name("triton"), launcher(op), "CPU")
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    yield
    registered._destroy()
