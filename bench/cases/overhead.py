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
Where = torch.device
# Each maker gives a call on the smallest tensors and a function for its value, which must be 1.
Call = tuple[Callable[[], Any], Callable[[], torch.Tensor]]


def _ones(*shape: int, where: Where, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=where)


def _amax(where: Where) -> Call:
    x = _ones(1, where=where)
    return (lambda: mixprec.amax(x)), (lambda: mixprec.amax(x))


def _quantize(where: Where) -> Call:
    x = _ones(1, where=where)
    return (
        lambda: mixprec.quantize(x, mixprec.E4M3),
        lambda: mixprec.quantize(x, mixprec.E4M3).data.float() / 256,  # 448 / 1, a power of two
    )


def _dequantize(where: Where) -> Call:
    with mixprec.use_backend("reference"):
        q = mixprec.quantize(_ones(1, where=where), mixprec.E4M3)
    return (lambda: mixprec.dequantize(q)), (lambda: mixprec.dequantize(q))


def _gemm(where: Where) -> Call:
    size = 1 if where.type == "cpu" else 16  # the least that kernels of a GPU take
    a = _ones(size, size, where=where, dtype=torch.bfloat16)
    return (lambda: mixprec.gemm(a, a)), (lambda: mixprec.gemm(a, a)[0, 0] / size)


def _gemm_accumulate(where: Where) -> Call:
    acc, a = torch.zeros(1, 1, device=where), _ones(1, 1, where=where, dtype=torch.bfloat16)

    def once() -> torch.Tensor:
        mixprec.gemm_accumulate_(acc.zero_(), a, a)
        return acc

    return (lambda: mixprec.gemm_accumulate_(acc, a, a)), once


def _unscale(where: Where) -> Call:
    grads, one = [_ones(1, where=where)], _ones(where=where)
    found_inf = torch.zeros_like(one)

    def halved() -> torch.Tensor:
        twice = [2 * _ones(1, where=where)]
        mixprec.unscale_(twice, one / 2, found_inf)
        return twice[0]

    return (lambda: mixprec.unscale_(grads, one, found_inf)), halved


def _grad_stats(where: Where) -> Call:
    grads, one = [_ones(1, where=where)], _ones(where=where)
    found_inf = torch.zeros_like(one)
    sum_sq = torch.zeros(1, dtype=torch.float64, device=where)

    def once() -> torch.Tensor:
        grad_stats_(grads, one, found_inf, sum_sq)
        return sum_sq

    return (lambda: grad_stats_(grads, one, found_inf, sum_sq)), once


def _is_one(make: Callable[[Where], Call], where: Where) -> str | None:
    _, value = make(where)
    one = torch.ones(1, device=where)
    return verify.equal("the value", value().float().reshape(1), one)


def _on_cpu(make: Callable[[Where], Call]) -> Workload:
    where = torch.device("cpu")
    return Workload(make(where)[0], {}, partial(_is_one, make, where))


def _on_gpu(op: str, make: Callable[[Where], Call]) -> Workload:
    a = _ones(16, 16, where=device.DEVICE, dtype=torch.bfloat16)
    call, _ = make(device.DEVICE)
    check = partial(_is_one, make, device.DEVICE)
    matmul = {"torch.matmul": lambda: torch.matmul(a, a)}
    return Workload(call, matmul, check, ops=(op,), bytes=4.0, host=True)


_CALLS: dict[str, Callable[[Where], Call]] = {
    "amax": _amax,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "gemm_accumulate_": _gemm_accumulate,
    "unscale_": _unscale,
    "grad_stats_": _grad_stats,
}
for _name, _make in _CALLS.items():
    if _name != "grad_stats_":
        case(
            f"overhead/{_name}",
            f"one call of mixprec.{_name} on one element",
            at_most(12.0, "us"),
            partial(_on_cpu, _make),
            quick=True,
        )
    if _name != "gemm_accumulate_":
        case(
            f"cuda/overhead/{_name}",
            f"Python's time for one call of mixprec.{_name}, less that of torch.matmul",
            at_most(OVER_MATMUL, "us", lambda medians: medians["ours"] - medians["torch.matmul"]),
            partial(_on_gpu, _name, _make),
            quick=True,
        )

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
        # The first run keeps the byte code, as installing a package does.
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"import mixprec failed: {run.stderr.strip().splitlines()[-1]}")
    seconds, triton, cuda = run.stdout.split()
    if triton == "True":
        return float(seconds), "import mixprec also imports triton"
    return float(seconds), "import mixprec initialises CUDA" if cuda == "True" else None


case(
    "import/mixprec",
    "import mixprec, over import torch",
    at_most(50.0, "ms"),
    lambda: Workload(lambda: _import()[0], {}, lambda: _import()[1], external=True),
)
