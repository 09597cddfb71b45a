"""What a call costs before any work is done, on the CPU and on the GPU; and the import."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec.ops import grad_stats_

from .. import device, verify
from .registry import Workload, at_most, case, times_the_time

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
    one, acc, sum_sq = a[:1, :1], torch.zeros(1, 1, device=where), 0 * x.double()
    return {
        "amax": (lambda: mixprec.amax(x), lambda result: result),
        # 448 / 1, a power of two
        "quantize": (lambda: mixprec.quantize(x, mixprec.E4M3), lambda q: q.data.float() / 256),
        "dequantize": (lambda: mixprec.dequantize(q), lambda result: result),
        "gemm": (lambda: mixprec.gemm(a, a), lambda c: c[0, 0] / size),
        "gemm_accumulate_": (lambda: mixprec.gemm_accumulate_(acc, one, one), lambda _: acc),
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
_CPU, _GPU = at_most(12.0, "us"), at_most(5.0, "us", lambda m: m["ours"] - m["torch.matmul"])
for _name in _OPS:
    _what = f"one call of mixprec.{_name}"
    if _name != "grad_stats_":
        _make = partial(_workload, False, _name)
        case(f"overhead/{_name}", f"{_what} on one element", _CPU, _make, quick=True)
    if _name != "gemm_accumulate_":
        _make, _what = partial(_workload, True, _name), f"Python's time for {_what}"
        case(f"cuda/overhead/{_name}", f"{_what}, less torch.matmul's", _GPU, _make, quick=True)


def _layer(recipe: str) -> Workload:
    """A linear layer, [8, 32] -> 32, forward and backward, against one of torch in autocast."""
    torch.manual_seed(0)
    x, g = torch.randn(8, 32).bfloat16().requires_grad_(), torch.randn(8, 32).bfloat16()
    theirs = torch.nn.Linear(32, 32)
    mine = mixprec.cast_parameters(mixprec.convert(copy.deepcopy(theirs), recipe), torch.bfloat16)

    def run(layer: torch.nn.Module, enabled: bool) -> list[torch.Tensor]:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled) if enabled else nullcontext():
            y = layer(x)
        y.backward(g)
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    def op_by_op() -> list[torch.Tensor]:
        with mixprec.use_backend("cpp"):
            return run(mine, False)

    def check() -> str | None:
        both = zip(run(mine, False), op_by_op(), strict=True)
        return verify.first(*(verify.equal(f"result {i}", *pair) for i, pair in enumerate(both)))

    ours, baseline = partial(run, mine, False), partial(run, theirs, True)
    return Workload(ours, {"torch.autocast": baseline}, check)


for _recipe, _most in {"bf16": 0.6, "fp8": 0.75, "fp8-delayed": 0.8, "mxfp8": 1.0}.items():
    _what = f"a layer [8, 32] -> 32 in {_recipe}, forward and backward"
    _make = partial(_layer, _recipe)
    case(f"overhead/layer/{_recipe}", _what, times_the_time(_most), _make, quick=True)


def _experts() -> Workload:
    """256 tokens of 8 experts, 64 -> 64, forward and backward, in fp8, against torch's in bf16."""
    torch.manual_seed(0)
    x, g = torch.randn(256, 64).bfloat16().requires_grad_(), torch.randn(256, 64).bfloat16()
    weight = torch.nn.Parameter(torch.randn(8, 64, 64).bfloat16())
    ends = [20, 61, 61, 100, 150, 192, 201, 256]
    offs = torch.tensor(ends, dtype=torch.int32)

    def run(layer: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        x.grad = weight.grad = None
        y = layer()
        y.backward(g)
        return [y.detach(), x.grad, weight.grad]  # type: ignore[list-item]

    def loop() -> torch.Tensor:
        parts = zip(x.split([*map(int.__sub__, ends, [0, *ends])]), weight, strict=True)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cat([torch.nn.functional.linear(*part) for part in parts])

    def grouped_mm() -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offs)

    ours = partial(run, partial(mixprec.functional.grouped_linear, x, weight, offs, recipe="fp8"))

    def check() -> str | None:
        with mixprec.use_backend("cpp"):
            op_by_op = ours()
        both = zip(ours(), op_by_op, strict=True)
        return verify.first(*(verify.equal(f"result {i}", *pair) for i, pair in enumerate(both)))

    theirs = {"torch.autocast": partial(run, loop), "grouped_mm": partial(run, grouped_mm)}
    return Workload(ours, theirs, check)


_what = "256 tokens of 8 experts, 64 -> 64, in fp8, forward and backward"
case("overhead/layer/experts", _what, times_the_time(0.6), _experts, quick=True)


def _import() -> float:
    """Seconds of `import mixprec` over `import torch`, in a fresh process."""
    clock = "from time import perf_counter as now; import torch; start = now()"
    # The first run keeps the byte code, as installing a package does; -c looks for modules in the
    # current folder first.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"{clock}; import mixprec; print(now() - start)"]
    return float(subprocess.check_output(command, cwd=tempfile.gettempdir(), env=env))


case(
    "import/mixprec",
    "import mixprec, over import torch",
    at_most(50.0, "ms"),
    lambda: Workload(_import, {}, lambda: None, external=True),
)
