"""The GPU kernels that only move bytes, besides quantize; and those that compute a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import mixprec
from mixprec import ops
from mixprec.ops import grad_stats_, unscale_

from .. import device, verify
from . import steps
from .quantize import BLOCK, GPU_SHAPE
from .registry import GPU_DTYPES, Workload, at_most, case, times_faster

E4M3_MAX = 448.0
MEBIBYTE = 1 << 20


def _copy(size: int) -> Workload:
    (count,) = device.sized(size // 4, tiny=1000)

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = device.randn(count, seed=i)
        return torch.empty_like(source), source

    return Workload(lambda t: t[0].copy_(t[1]), {}, lambda: None, inputs, bytes=8.0 * count)


for _size in (64, 256, 1024):
    case(
        f"cuda/copy/{_size}MiB",
        f"torch's copy of {_size} MiB: the bandwidth that all others are held against",
        None,
        partial(_copy, _size * MEBIBYTE),
        quick=True,
    )


# amax and dequantize


def _amax(dtype: torch.dtype) -> Workload:
    m, k = device.sized(*GPU_SHAPE)
    inputs = partial(device.randn, m, k, dtype=dtype)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().float()

    return Workload(
        mixprec.amax,
        device.eager_and_compiled(plain),
        lambda: verify.equal("amax", mixprec.amax(inputs()), plain(inputs())),
        lambda i: inputs(seed=i),
        ops=("amax",),
        bytes=float(dtype.itemsize * m * k),
    )


def _dequantize(granularity: str, dtype: torch.dtype) -> Workload:
    m, k = device.sized(*GPU_SHAPE, tiny=2 * BLOCK)

    def inputs(i: int) -> mixprec.Quantized:
        with mixprec.use_backend("reference"):
            x = device.randn(m, k, dtype=torch.bfloat16, seed=i)
            return mixprec.quantize(x, mixprec.E4M3, granularity=granularity)

    def plain(q: mixprec.Quantized) -> torch.Tensor:
        if granularity == "tensor":
            return (q.data.float() * q.scale_inv).to(dtype)
        tiles = q.data.view(m, -1, BLOCK).float() * q.scale_inv.unsqueeze(2)
        return tiles.to(dtype).view(m, k)

    def check() -> str | None:
        q = inputs(0)
        return verify.equal("x", mixprec.dequantize(q, dtype), plain(q))

    scales = 0 if granularity == "tensor" else m * (k // BLOCK)
    return Workload(
        lambda q: mixprec.dequantize(q, dtype),
        device.eager_and_compiled(plain),
        check,
        inputs,
        ops=("dequantize",),
        bytes=float((1 + dtype.itemsize) * m * k + 4 * scales),
    )


# Lists of gradients

LIST = (4, 2048, 50304)  # layers, width, vocabulary: 304M elements
_TINY = (1, 8, 16)
Grads = list[torch.Tensor]


def _grads(dtype: torch.dtype, size: tuple[int, ...] = LIST) -> Grads:
    shapes = steps.gpt_shapes(*(_TINY if device.DRY_RUN else size))
    return [device.randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def _few(dtype: torch.dtype) -> Grads:
    """For comparing values: a small list, with an Inf at its very end."""
    grads = _grads(dtype, ())
    grads[-1][-1] = float("inf")
    return grads


def _scalar(value: float) -> torch.Tensor:
    return torch.full((), value, device=device.DEVICE)  # no copy from the host, which waits


def _unscale(dtype: torch.dtype) -> Workload:
    one, found_inf = _scalar(1.0), _scalar(0.0)  # by 1: the values stay, however often

    def torch_amp(grads: Grads) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)

    def foreach(grads: Grads) -> None:
        torch._foreach_mul_(grads, one)
        torch._foreach_norm(grads, float("inf"))

    def results() -> Grads:
        grads, flag = _few(dtype), _scalar(0.0)
        unscale_(grads, _scalar(0.125), flag)
        return [flag, *grads]

    grads = _grads(dtype)
    return Workload(
        lambda g: unscale_(g, one, found_inf),
        {"torch amp foreach": torch_amp, "torch foreach mul, norm": foreach},
        partial(verify.same_as_reference, results),
        lambda i: grads,
        ops=("unscale_",),
        bytes=2.0 * dtype.itemsize * sum(g.numel() for g in grads),
    )


def _grad_stats(dtype: torch.dtype) -> Workload:
    def ours(grads: Grads) -> tuple[torch.Tensor, torch.Tensor]:
        found_inf = _scalar(0.0)
        sum_sq = torch.empty(len(grads), dtype=torch.float64, device=device.DEVICE)
        grad_stats_(grads, one, found_inf, sum_sq)
        return sum_sq, found_inf

    def total_norm(grads: Grads) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(grads, foreach=True)

    def check() -> str | None:
        grads = _few(dtype)
        _, found = ours(grads)
        grads[-1][-1] = 1.0
        got, fine = ours(grads)
        want = torch.stack([g.double().square().sum() for g in grads])
        return verify.first(
            verify.equal("found_inf", found, _scalar(1.0)),
            verify.equal("found_inf of finite gradients", fine, _scalar(0.0)),
            verify.close("sums of squares", [got], [want], rtol=1e-12, atol=0.0),
        )

    one, grads = _scalar(1.0), _grads(dtype)
    return Workload(
        ours,
        {"torch get_total_norm": total_norm},
        check,
        lambda i: grads,
        ops=("grad_stats_",),
        bytes=float(dtype.itemsize * sum(g.numel() for g in grads)),
    )


_LIST = "52 gradients of a GPT"
_SIZE = "x".join(map(str, GPU_SHAPE))
_MOVE_BYTES: tuple[tuple[str, str, float, Callable[[], Workload]], ...] = (
    # name, what, times torch, workload
    *((f"amax/{name}/{_SIZE}", f"max |x| of {name}", 1.0, partial(_amax, dtype))
      for name, dtype in GPU_DTYPES.items()),
    *((f"dequantize/tensor-{name}/{_SIZE}", f"e4m3 -> {name}, one scale", 1.0,
       partial(_dequantize, "tensor", dtype)) for name, dtype in GPU_DTYPES.items()),
    (f"dequantize/block1x128-bf16/{_SIZE}", "e4m3 -> bf16, a scale per 128 elements", 1.0,
     partial(_dequantize, "block1x128", torch.bfloat16)),
    *((f"unscale_/{name}/304M", f"{_LIST}, {name}: multiplied in place, checked for Inf and NaN",
       1.2, partial(_unscale, dtype)) for name, dtype in GPU_DTYPES.items()),
    *((f"grad_stats_/{name}/304M", f"{_LIST}, {name}: sums of squares in FP64, and the check",
       1.2, partial(_grad_stats, dtype)) for name, dtype in GPU_DTYPES.items()),
)  # fmt: skip
for _name, _what, _times, _make in _MOVE_BYTES:
    case(f"cuda/{_name}", _what, times_faster(_times), _make, share=0.9, quick=True)


# Kernels that compute a few numbers: their time is that of a launch

HISTORY = 16  # amaxes of delayed scaling


def _few_numbers(op: str, count: int, size: int) -> Workload:
    values = device.randn(count).abs() + 0.5

    def inputs(_: int) -> tuple[Any, ...]:
        scales, histories = torch.ones_like(values), values.new_ones(count, HISTORY)
        if op == "update_delayed_scales_":  # from the second call on there is nothing to record
            return [*histories], [*scales], [*values.clone()], [E4M3_MAX] * count
        return {
            "inv_scale": (values,),
            "clip_coef": (values.double(), 1.0),
            "scale_from_amax_": (scales, scales.clone(), values, mixprec.E4M3),
        }[op]

    def ours(given: tuple[Any, ...]) -> Any:
        return getattr(ops, op)(*given)

    def results() -> list[torch.Tensor]:
        given = inputs(0)
        return [t for t in tree_leaves([ours(given), given]) if isinstance(t, torch.Tensor)]

    check = partial(verify.same_as_reference, results)
    return Workload(ours, {}, check, inputs, ops=(op,), bytes=float(size * count))


for _op, _what, _count, _bytes in (
    ("update_delayed_scales_", f"the end of a step of delayed scaling: 128 histories of {HISTORY} "
     "amaxes", 128, 8 * (HISTORY + 2)),
    ("inv_scale", "inv_scale of 1 number", 1, 8),
    ("clip_coef", "clip_coef of 1,000 numbers", 1000, 8),
    ("scale_from_amax_", "scale_from_amax_ of 4,096 numbers", 4096, 12),
):  # fmt: skip
    _make = partial(_few_numbers, _op, _count, _bytes)
    case(f"cuda/{_op}/{_count}", _what, at_most(5.0, "us"), _make, quick=True)
