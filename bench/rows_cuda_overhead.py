"""What a call costs in Python on the GPU path, beside torch.matmul, on the smallest tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec.ops import grad_stats_

from . import gpu, verify
from .gpu_run import GpuCase
from .registry import at_most, row

OVER_MATMUL = 5.0  # us
# Makes a call on the smallest tensors, and gives with it the tensors that hold its result.
Call = tuple[Callable[[], Any], Callable[[Any], list[torch.Tensor]]]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=gpu.DEVICE)


def _amax() -> Call:
    x = _ones(1)
    return lambda: mixprec.amax(x), lambda out: [out]


def _quantize() -> Call:
    x = _ones(1)
    return lambda: mixprec.quantize(x, mixprec.E4M3), lambda q: [q.data, q.scale_inv]


def _dequantize() -> Call:
    with mixprec.use_backend("reference"):
        q = mixprec.quantize(_ones(1), mixprec.E4M3)
    return lambda: mixprec.dequantize(q), lambda out: [out]


def _unscale() -> Call:
    grads, one, found_inf = [_ones(1)], _ones(), _ones()
    return lambda: mixprec.unscale_(grads, one, found_inf), lambda _: grads


def _grad_stats() -> Call:
    grads, one, found_inf = [_ones(1)], _ones(), _ones()
    sum_sq = torch.zeros(1, dtype=torch.float64, device=gpu.DEVICE)
    return lambda: grad_stats_(grads, one, found_inf, sum_sq), lambda _: [sum_sq]


def _gemm() -> Call:
    a = _ones(16, 16, dtype=torch.bfloat16)
    return lambda: mixprec.gemm(a, a), lambda out: [out]


_CALLS: dict[str, Callable[[], Call]] = {
    "amax": _amax,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "unscale_": _unscale,
    "grad_stats_": _grad_stats,
    "gemm": _gemm,
}


def _case(op: str) -> GpuCase:
    a = _ones(16, 16, dtype=torch.bfloat16)

    def check() -> str | None:
        call, result = _CALLS[op]()
        got = result(call())
        with mixprec.use_backend("reference"):
            call, result = _CALLS[op]()
            want = result(call())
        pairs = zip(got, want, strict=True)
        return verify.first(*(verify.equal("the result", *pair) for pair in pairs))

    return GpuCase(
        (op,),
        lambda _: _CALLS[op]()[0],
        lambda call: call(),
        {"torch.matmul": lambda _: torch.matmul(a, a)},
        check,
        bytes=4.0,
        host=True,
    )


for _op in _CALLS:
    row(
        f"cuda/overhead/{_op}",
        f"Python's time for one call of mixprec.{_op}, less that of torch.matmul",
        at_most(OVER_MATMUL, "us", lambda medians: medians["ours"] - medians["torch.matmul"]),
        device="cuda",
        quick=True,
    )(partial(_case, _op))
