"""The GPU kernels that only move bytes, besides quantize; and those that compute a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import mixprec
from mixprec.ops import (
    clip_coef,
    grad_stats_,
    inv_scale,
    scale_from_amax_,
    unscale_,
    update_delayed_scales_,
)

from .. import device, verify
from . import steps
from .quantize import BLOCK, DTYPES, GPU_SHAPE
from .registry import Workload, at_most, case, times_faster

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

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().float()

    def check() -> str | None:
        x = device.randn(m, k, dtype=dtype)
        return verify.equal("amax", mixprec.amax(x), plain(x))

    return Workload(
        mixprec.amax,
        {"torch eager": plain, "torch.compile": device.compiled(plain)},
        check,
        lambda i: device.randn(m, k, dtype=dtype, seed=i),
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
        {"torch eager": plain, "torch.compile": device.compiled(plain)},
        check,
        inputs,
        ops=("dequantize",),
        bytes=float((1 + dtype.itemsize) * m * k + 4 * scales),
    )


def _moves_bytes(name: str, what: str, times: float, make: Callable[[], Workload]) -> None:
    """Against torch, and against 90 % of the speed of a copy."""
    case(f"cuda/{name}", what, times_faster(times), make, share=0.9, quick=True)


for _name, _dtype in DTYPES.items():
    _moves_bytes(f"amax/{_name}/8192x8192", f"max |x| of {_name}", 1.0, partial(_amax, _dtype))
    _tensor = partial(_dequantize, "tensor", _dtype)
    _moves_bytes(
        f"dequantize/tensor-{_name}/8192x8192", f"e4m3 -> {_name}, one scale", 1.0, _tensor
    )
_moves_bytes(
    "dequantize/block1x128-bf16/8192x8192",
    "e4m3 -> bf16, a scale per 128 elements",
    1.0,
    partial(_dequantize, "block1x128", torch.bfloat16),
)


# Lists of gradients

LIST = (4, 2048, 50304)  # layers, width, vocabulary: 304M elements
_TINY = (1, 8, 16)
Grads = list[torch.Tensor]


def _grads(dtype: torch.dtype, seed: int = 0) -> Grads:
    shapes = steps.gpt_shapes(*(_TINY if device.DRY_RUN else LIST))
    return [device.randn(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


def _few(dtype: torch.dtype) -> Grads:
    """For comparing values: a small list, with an Inf at its very end."""
    shapes = steps.gpt_shapes(*_TINY) if device.DRY_RUN else steps.gpt_shapes()
    grads = [device.randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    grads[-1][-1] = float("inf")
    return grads


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=device.DEVICE)


def _unscale(dtype: torch.dtype) -> Workload:
    one, found_inf = _scalar(1.0), _scalar(0.0)  # by 1: the values stay, however often

    def torch_amp(grads: Grads) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)

    def foreach(grads: Grads) -> None:
        torch._foreach_mul_(grads, one)
        torch._foreach_norm(grads, float("inf"))

    def results() -> dict[str, torch.Tensor]:
        grads, flag = _few(dtype), _scalar(0.0)
        unscale_(grads, _scalar(0.125), flag)
        return {"found_inf": flag, **{f"grads[{i}]": grad for i, grad in enumerate(grads)}}

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


for _name, _dtype in DTYPES.items():
    _list = f"52 gradients of a GPT, {_name}"
    _moves_bytes(
        f"unscale_/{_name}/304M",
        f"{_list}: multiplied in place and checked for Inf and NaN",
        1.2,
        partial(_unscale, _dtype),
    )
    _moves_bytes(
        f"grad_stats_/{_name}/304M",
        f"{_list}: sums of squares in FP64, and the check",
        1.2,
        partial(_grad_stats, _dtype),
    )


# Kernels that compute a few numbers: their time is that of a launch

FEW_NUMBERS = 4096
LAYERS, HISTORY = 64, 16  # of delayed scales: two tensors a layer, so many amaxes each
LAUNCH = 5.0  # us


def _few_numbers(op: str, count: int) -> Workload:
    values = device.randn(count).abs() + 0.5
    sums = values.double()

    def ours(_: None) -> torch.Tensor:
        if op == "inv_scale":
            return inv_scale(values[:1])
        if op == "clip_coef":
            return clip_coef(sums, 1.0)
        scales = torch.empty(2, count, device=device.DEVICE)
        scale_from_amax_(scales[0], scales[1], values, mixprec.E4M3)
        return scales

    def results() -> dict[str, torch.Tensor]:
        return {"the result": ours(None)}

    size = {"inv_scale": 8, "clip_coef": 8 * count + 4, "scale_from_amax_": 12 * count}[op]
    check = partial(verify.same_as_reference, results)
    return Workload(ours, {}, check, lambda _: None, ops=(op,), bytes=float(size))


def _delayed(count: int) -> Workload:
    new = device.randn(count).abs() + 0.5

    def tensors() -> tuple[list[torch.Tensor], ...]:
        histories = torch.ones(count, HISTORY, device=device.DEVICE)
        return [*histories], [*torch.ones(count, device=device.DEVICE)], [*new.clone()]

    def results() -> dict[str, torch.Tensor]:
        lists = tensors()
        update_delayed_scales_(*lists, [E4M3_MAX] * count)
        names = ("histories", "scales", "amaxes")
        return {
            name: torch.cat([t.view(-1) for t in x]) for name, x in zip(names, lists, strict=True)
        }

    # From the second call on there is nothing new to record: the time is that of the launch.
    return Workload(
        lambda lists: update_delayed_scales_(*lists, [E4M3_MAX] * count),
        {},
        partial(verify.same_as_reference, results),
        lambda _: tensors(),
        ops=("update_delayed_scales_",),
        bytes=8.0 * count * (HISTORY + 2),
    )


case(
    f"cuda/update_delayed_scales_/{2 * LAYERS}",
    f"the end of a step of delayed scaling: {2 * LAYERS} histories of {HISTORY} amaxes",
    at_most(LAUNCH, "us"),
    partial(_delayed, 2 * LAYERS),
    quick=True,
)
for _op, _number in (("inv_scale", 1), ("clip_coef", 1000), ("scale_from_amax_", FEW_NUMBERS)):
    case(
        f"cuda/{_op}/{_number}",
        f"{_op} of {_number} numbers",
        at_most(LAUNCH, "us"),
        partial(_few_numbers, _op, _number),
        quick=True,
    )
