"""What a call costs before any work is done, on the CPU and on the GPU; and the import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec.ops import grad_stats_

from .. import device, verify
from .registry import Workload, at_most, case

OVER_MATMUL = 5.0  # us
# What a call needs, and the value that its result or a tensor that it writes then has: 1.
Call = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]


def _calls(where: str) -> dict[str, Call]:
    """One call of each op on the smallest tensors."""
    x, zero = torch.ones(1, device=where), torch.zeros((), device=where)
    half, grads = zero + 0.5, [2 * x]
    with mixprec.use_backend("reference"):
        q = mixprec.quantize(x, mixprec.E4M3)
    size = 1 if where == "cpu" else 16  # the least that kernels of a GPU take
    a = torch.ones(size, size, device=where).bfloat16()
    acc, sum_sq = torch.zeros(1, 1, device=where), 0 * x.double()
    return {
        "amax": (lambda: mixprec.amax(x), lambda result: result),
        # 448 / 1, a power of two
        "quantize": (lambda: mixprec.quantize(x, mixprec.E4M3), lambda q: q.data.float() / 256),
        "dequantize": (lambda: mixprec.dequantize(q), lambda result: result),
        "gemm": (lambda: mixprec.gemm(a, a), lambda c: c[0, 0] / size),
        "gemm_accumulate_": (
            lambda: mixprec.gemm_accumulate_(acc, a[:1, :1], a[:1, :1]),
            lambda _: acc,
        ),
        "unscale_": (lambda: mixprec.unscale_(grads, half, zero), lambda _: grads[0]),
        "grad_stats_": (lambda: grad_stats_(grads, half, zero, sum_sq), lambda _: sum_sq),
    }


def _is_one(op: str, where: str) -> str | None:
    call, value = _calls(where)[op]
    return verify.equal("the value", value(call()).float().reshape(1), torch.ones(1, device=where))


def _workload(on_gpu: bool, op: str) -> Workload:
    where = device.where(on_gpu)
    call, check = _calls(where)[op][0], partial(_is_one, op, where)
    if not on_gpu:
        return Workload(call, {}, check)
    a = torch.ones(16, 16, device=where).bfloat16()
    matmul = {"torch.matmul": lambda: torch.matmul(a, a)}
    return Workload(call, matmul, check, ops=(op,), bytes=4.0, host=True)


_OPS = ("amax", "quantize", "dequantize", "gemm", "gemm_accumulate_", "unscale_", "grad_stats_")
for _name in _OPS:
    if _name != "grad_stats_":
        case(
            f"overhead/{_name}",
            f"one call of mixprec.{_name} on one element",
            at_most(12.0, "us"),
            partial(_workload, False, _name),
            quick=True,
        )
    if _name != "gemm_accumulate_":
        case(
            f"cuda/overhead/{_name}",
            f"Python's time for one call of mixprec.{_name}, less that of torch.matmul",
            at_most(OVER_MATMUL, "us", lambda medians: medians["ours"] - medians["torch.matmul"]),
            partial(_workload, True, _name),
            quick=True,
        )

_IMPORT = """
import time, torch
start = time.perf_counter()
import mixprec
print(time.perf_counter() - start)
"""


def _import() -> float:
    """Seconds of `import mixprec` over `import torch`, in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),  # -c looks for modules in the current folder first
        # The first run keeps the byte code, as installing a package does.
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"import mixprec failed: {run.stderr.strip().splitlines()[-1]}")
    return float(run.stdout)


case(
    "import/mixprec",
    "import mixprec, over import torch",
    at_most(50.0, "ms"),
    lambda: Workload(_import, {}, lambda: None, external=True),
)
