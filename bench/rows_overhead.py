"""What a call costs before any work is done, and what the import costs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec

from . import verify
from .registry import Case, at_most, row

# Each maker gives a call on the smallest tensors and a function for its value, which must be 1.
Call = tuple[Callable[[], Any], Callable[[], torch.Tensor]]


def _amax() -> Call:
    x = torch.ones(1)
    return (lambda: mixprec.amax(x)), (lambda: mixprec.amax(x))


def _quantize() -> Call:
    x = torch.ones(1)
    return (
        lambda: mixprec.quantize(x, mixprec.E4M3),
        lambda: mixprec.quantize(x, mixprec.E4M3).data.float() / 256,  # 448 / 1, a power of two
    )


def _dequantize() -> Call:
    q = mixprec.quantize(torch.ones(1), mixprec.E4M3)
    return (lambda: mixprec.dequantize(q)), (lambda: mixprec.dequantize(q))


def _gemm() -> Call:
    a = torch.ones(1, 1, dtype=torch.bfloat16)
    return (lambda: mixprec.gemm(a, a)), (lambda: mixprec.gemm(a, a))


def _gemm_accumulate() -> Call:
    acc, a = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bfloat16)

    def once() -> torch.Tensor:
        mixprec.gemm_accumulate_(acc.zero_(), a, a)
        return acc

    return (lambda: mixprec.gemm_accumulate_(acc, a, a)), once


def _unscale() -> Call:
    grads, one, found_inf = [torch.ones(1)], torch.ones(()), torch.zeros(())

    def halved() -> torch.Tensor:
        twice = [torch.full((1,), 2.0)]
        mixprec.unscale_(twice, torch.tensor(0.5), found_inf)
        return twice[0]

    return (lambda: mixprec.unscale_(grads, one, found_inf)), halved


def _call_case(make: Callable[[], Call]) -> Case:
    call, value = make()
    check = partial(_is_one, value)
    return Case(call, {}, check)


def _is_one(value: Callable[[], torch.Tensor]) -> str | None:
    return verify.equal("the value", value().float().reshape(1), torch.ones(1))


_CALLS: dict[str, Callable[[], Call]] = {
    "amax": _amax,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "gemm_accumulate_": _gemm_accumulate,
    "unscale_": _unscale,
}
for _name, _make in _CALLS.items():
    row(
        f"overhead/{_name}",
        f"one call of mixprec.{_name} on one element",
        at_most(12.0, "us"),
        quick=True,
    )(partial(_call_case, _make))

# Prints the seconds that the import takes once torch is there, and what it should have left alone.
_IMPORT = """
import sys, time
import torch
before = "triton" in sys.modules
start = time.perf_counter()
import mixprec
seconds = time.perf_counter() - start
print(seconds, "triton" in sys.modules and not before, torch.cuda.is_initialized())
"""


def _import() -> tuple[float, str | None]:
    """Seconds over `import torch`, in a fresh process, and what is wrong with the import."""
    run = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),  # -c looks for modules in the current folder first
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"import mixprec failed: {run.stderr.strip().splitlines()[-1]}")
    seconds, triton, cuda = run.stdout.split()
    if triton == "True":
        return float(seconds), "import mixprec also imports triton"
    return float(seconds), "import mixprec initialises CUDA" if cuda == "True" else None


@row("import/mixprec", "import mixprec, over import torch", at_most(50.0, "ms"))
def _import_case() -> Case:
    return Case(lambda: _import()[0], {}, lambda: _import()[1], external=True)
