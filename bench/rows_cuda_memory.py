"""The GPU kernels that only move bytes: copy, quantize, dequantize, amax, unscale_, grad_stats_."""

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

from . import gpu, steps, verify
from .gpu_run import GpuCase
from .registry import at_most, row, times_faster

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
SHAPE = (8192, 8192)
MEBIBYTE = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Result = tuple[torch.Tensor | None, ...]


def _copy_case(size: int) -> GpuCase:
    (count,) = gpu.sized(size // 4, tiny=1000)

    def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = gpu.randn(count, seed=i)
        return torch.empty_like(source), source

    return GpuCase((), inputs, lambda t: t[0].copy_(t[1]), {}, lambda: None, bytes=8.0 * count)


for _size in (64, 256, 1024):
    row(
        f"cuda/copy/{_size}MiB",
        f"torch's copy of {_size} MiB: the bandwidth that all others are held against",
        None,
        device="cuda",
        quick=True,
        bytes=2.0 * _size * MEBIBYTE,
    )(partial(_copy_case, _size * MEBIBYTE))


# quantize


def _cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _torch_tensor(x: torch.Tensor, scale: torch.Tensor | None, transpose: bool) -> Result:
    amax = x.abs().amax().float()
    factor = E4M3_MAX / amax if scale is None else scale
    q = _cast(x, factor)
    return q, q.t().contiguous() if transpose else None, 1.0 / factor, amax


def _torch_row(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    factor = E4M3_MAX / x.abs().amax(1, keepdim=True).float()
    if not transpose:
        return _cast(x, factor), 1.0 / factor
    factor_t = E4M3_MAX / x.abs().amax(0, keepdim=True).float()
    q_t = _cast(x, factor_t).t().contiguous()
    return _cast(x, factor), 1.0 / factor, q_t, 1.0 / factor_t


def _torch_block1x128(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    tiles = x.view(x.shape[0], -1, BLOCK)
    factor = E4M3_MAX / tiles.abs().amax(2, keepdim=True).float()
    q = _cast(tiles, factor).view_as(x), 1.0 / factor
    if not transpose:
        return q
    tiles = x.view(-1, BLOCK, x.shape[1])
    factor = E4M3_MAX / tiles.abs().amax(1, keepdim=True).float()
    return *q, _cast(tiles, factor).view_as(x).t().contiguous(), 1.0 / factor


def _torch_block128x128(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    tiles = x.view(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)
    factor = E4M3_MAX / tiles.abs().amax((1, 3), keepdim=True).float()
    q = _cast(tiles, factor).view_as(x)
    return q, 1.0 / factor, q.t().contiguous() if transpose else None


_TORCH: dict[str, Callable[..., Result]] = {
    "tensor": _torch_tensor,
    "row": _torch_row,
    "block1x128": _torch_block1x128,
    "block128x128": _torch_block128x128,
}


def quantize_bytes(
    shape: tuple[int, int], size: int, granularity: str, given: bool, transpose: bool
) -> float:
    """x is read once, or twice where a scale depends on more of it than a block of threads sees;
    q and q^T are written, and the scales."""
    m, k = shape
    blocks = {
        "tensor": 0,
        "row": m + (k if transpose else 0),
        "block1x128": m * (k // BLOCK) * (2 if transpose else 1),
        "block128x128": (m // BLOCK) * (k // BLOCK),
    }[granularity]
    twice = not given if granularity == "tensor" else granularity == "row" and transpose
    return (size * (2 if twice else 1) + (2 if transpose else 1)) * float(m * k) + 4.0 * blocks


def _quantize_case(
    shape: tuple[int, int], dtype: torch.dtype, granularity: str, given: bool, transpose: bool
) -> GpuCase:
    m, k = gpu.sized(*shape, tiny=2 * BLOCK)
    scale = torch.tensor(64.0, device=gpu.DEVICE) if given else None

    def ours(x: torch.Tensor) -> mixprec.Quantized:
        return mixprec.quantize(x, mixprec.E4M3, scale, transpose, granularity)

    def check() -> str | None:
        x = gpu.randn(m, k, dtype=dtype)
        got = ours(x)
        with mixprec.use_backend("reference"):
            want = ours(x)
        names = ["data", "scale_inv", "amax"] + (["data_t"] if transpose else [])
        names += [] if want.scale_inv_t is None else ["scale_inv_t"]
        return verify.first(*(verify.equal(n, getattr(got, n), getattr(want, n)) for n in names))

    def plain(x: torch.Tensor) -> Result:
        return _TORCH[granularity](x, scale, transpose)

    return GpuCase(
        ("quantize",),
        lambda i: gpu.randn(m, k, dtype=dtype, seed=i),
        ours,
        {"torch eager": plain, "torch.compile": gpu.compiled(plain)},
        check,
        bytes=quantize_bytes((m, k), dtype.itemsize, granularity, given, transpose),
    )


def _quantize_row(
    name: str, shape: tuple[int, int], granularity: str, given: bool, transpose: bool
) -> None:
    dtype = DTYPES[name]
    words = ("given" if given else "current") if granularity == "tensor" else granularity
    words += "-transpose" if transpose else ""
    scales = "the scale given" if given else f"scales per {granularity} from this x"
    row(
        f"cuda/quantize/{name}/{words}/{shape[0]}x{shape[1]}",
        f"{name} -> e4m3 and amax{', with the transpose' if transpose else ''}, {scales}",
        times_faster(1.4 if transpose else 1.0),
        share=0.9,
        device="cuda",
        quick=True,
        bytes=quantize_bytes(shape, dtype.itemsize, granularity, given, transpose),
    )(partial(_quantize_case, shape, dtype, granularity, given, transpose))


for _dtype in DTYPES:
    for _transpose in (False, True):
        for _given in (True, False):
            _quantize_row(_dtype, SHAPE, "tensor", _given, _transpose)
for _granularity in ("row", "block1x128", "block128x128"):
    for _transpose in (False, True):
        _quantize_row("bf16", SHAPE, _granularity, False, _transpose)
for _shape in ((2048, 4096), (16384, 16384)):
    _quantize_row("bf16", _shape, "tensor", False, True)


# amax and dequantize


def _amax_case(dtype: torch.dtype) -> GpuCase:
    m, k = gpu.sized(*SHAPE)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().float()

    def check() -> str | None:
        x = gpu.randn(m, k, dtype=dtype)
        return verify.equal("amax", mixprec.amax(x), plain(x))

    return GpuCase(
        ("amax",),
        lambda i: gpu.randn(m, k, dtype=dtype, seed=i),
        mixprec.amax,
        {"torch eager": plain, "torch.compile": gpu.compiled(plain)},
        check,
        bytes=float(dtype.itemsize * m * k),
    )


def _dequantize_case(granularity: str, dtype: torch.dtype) -> GpuCase:
    m, k = gpu.sized(*SHAPE, tiny=2 * BLOCK)

    def inputs(i: int) -> mixprec.Quantized:
        with mixprec.use_backend("reference"):
            x = gpu.randn(m, k, dtype=torch.bfloat16, seed=i)
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
    return GpuCase(
        ("dequantize",),
        inputs,
        lambda q: mixprec.dequantize(q, dtype),
        {"torch eager": plain, "torch.compile": gpu.compiled(plain)},
        check,
        bytes=float((1 + dtype.itemsize) * m * k + 4 * scales),
    )


_COUNT = float(SHAPE[0] * SHAPE[1])
for _dtype, _type in DTYPES.items():
    row(
        f"cuda/amax/{_dtype}/8192x8192",
        f"max |x| of {_dtype}",
        times_faster(1.0),
        share=0.9,
        device="cuda",
        quick=True,
        bytes=_type.itemsize * _COUNT,
    )(partial(_amax_case, _type))
    row(
        f"cuda/dequantize/tensor-{_dtype}/8192x8192",
        f"e4m3 -> {_dtype}, one scale",
        times_faster(1.0),
        share=0.9,
        device="cuda",
        quick=True,
        bytes=(1 + _type.itemsize) * _COUNT,
    )(partial(_dequantize_case, "tensor", _type))
row(
    "cuda/dequantize/block1x128-bf16/8192x8192",
    "e4m3 -> bf16, a scale per 128 elements",
    times_faster(1.0),
    share=0.9,
    device="cuda",
    quick=True,
    bytes=3 * _COUNT + 4 * _COUNT / BLOCK,
)(partial(_dequantize_case, "block1x128", torch.bfloat16))


# Lists of gradients

LIST = (4, 2048, 50304)  # layers, width, vocabulary: 304M elements
_TINY = (1, 8, 16)
Grads = list[torch.Tensor]


def _grads(dtype: torch.dtype, seed: int = 0) -> Grads:
    shapes = steps.gpt_shapes(*(_TINY if gpu.REHEARSAL else LIST))
    return [gpu.randn(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


def _few(dtype: torch.dtype) -> Grads:
    """For comparing values: a small list, with an Inf at its very end."""
    shapes = steps.gpt_shapes(*_TINY) if gpu.REHEARSAL else steps.gpt_shapes()
    grads = [gpu.randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    grads[-1][-1] = float("inf")
    return grads


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=gpu.DEVICE)


def _unscale_case(dtype: torch.dtype) -> GpuCase:
    one, found_inf = _scalar(1.0), _scalar(0.0)  # by 1: the values stay, however often

    def torch_amp(grads: Grads) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)

    def foreach(grads: Grads) -> None:
        torch._foreach_mul_(grads, one)
        torch._foreach_norm(grads, float("inf"))

    def check() -> str | None:
        flags = []
        lists = []
        for backend in (None, "reference"):
            grads, flag = _few(dtype), _scalar(0.0)
            if backend is None:
                unscale_(grads, _scalar(0.125), flag)
            else:
                with mixprec.use_backend(backend):
                    unscale_(grads, _scalar(0.125), flag)
            flags.append(flag)
            lists.append(grads)
        pairs = zip(*lists, strict=True)
        same = (verify.equal("a gradient", *pair) for pair in pairs)
        return verify.first(verify.equal("found_inf", flags[0], _scalar(1.0)), *same)

    grads = _grads(dtype)
    return GpuCase(
        ("unscale_",),
        lambda i: grads,
        lambda g: unscale_(g, one, found_inf),
        {"torch amp foreach": torch_amp, "torch foreach mul, norm": foreach},
        check,
        bytes=2.0 * dtype.itemsize * sum(g.numel() for g in grads),
    )


def _grad_stats_case(dtype: torch.dtype) -> GpuCase:
    def ours(grads: Grads) -> tuple[torch.Tensor, torch.Tensor]:
        found_inf = _scalar(0.0)
        sum_sq = torch.empty(len(grads), dtype=torch.float64, device=gpu.DEVICE)
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
    return GpuCase(
        ("grad_stats_",),
        lambda i: grads,
        ours,
        {"torch get_total_norm": total_norm},
        check,
        bytes=float(dtype.itemsize * sum(g.numel() for g in grads)),
    )


_ELEMENTS = float(steps.elements(steps.gpt_shapes(*LIST)))
for _dtype, _type in DTYPES.items():
    row(
        f"cuda/unscale_/{_dtype}/304M",
        f"52 gradients of a GPT, {_dtype}: multiplied in place and checked for Inf and NaN",
        times_faster(1.2),
        share=0.9,
        device="cuda",
        quick=True,
        bytes=2 * _type.itemsize * _ELEMENTS,
    )(partial(_unscale_case, _type))
    row(
        f"cuda/grad_stats_/{_dtype}/304M",
        f"52 gradients of a GPT, {_dtype}: sums of squares in FP64, and the check",
        times_faster(1.2),
        share=0.9,
        device="cuda",
        quick=True,
        bytes=_type.itemsize * _ELEMENTS,
    )(partial(_grad_stats_case, _type))


# Kernels that compute a few numbers: their time is that of a launch

FEW_NUMBERS = 4096
LAYERS, HISTORY = 64, 16  # of delayed scales: two tensors a layer, so many amaxes each
LAUNCH = 5.0  # us


def _number_case(op: str, count: int) -> GpuCase:
    values = gpu.randn(count).abs() + 0.5
    sums = values.double()

    def ours(_: None) -> torch.Tensor:
        if op == "inv_scale":
            return inv_scale(values[:1])
        if op == "clip_coef":
            return clip_coef(sums, 1.0)
        scales = torch.empty(2, count, device=gpu.DEVICE)
        scale_from_amax_(scales[0], scales[1], values, mixprec.E4M3)
        return scales

    def check() -> str | None:
        got = ours(None)
        with mixprec.use_backend("reference"):
            return verify.equal("the result", got, ours(None))

    size = {"inv_scale": 8, "clip_coef": 8 * count + 4, "scale_from_amax_": 12 * count}[op]
    return GpuCase((op,), lambda _: None, ours, {}, check, bytes=float(size))


def _delayed_case(count: int) -> GpuCase:
    new = gpu.randn(count).abs() + 0.5

    def tensors() -> tuple[list[torch.Tensor], ...]:
        histories = torch.ones(count, HISTORY, device=gpu.DEVICE)
        return [*histories], [*torch.ones(count, device=gpu.DEVICE)], [*new.clone()]

    def ours(lists: tuple[list[torch.Tensor], ...]) -> torch.Tensor:
        update_delayed_scales_(*lists, [E4M3_MAX] * count)
        return torch.cat([t.view(-1) for tensors in lists for t in tensors])

    def check() -> str | None:
        got = ours(tensors())
        with mixprec.use_backend("reference"):
            return verify.equal("the result", got, ours(tensors()))

    # From the second call on there is nothing new to record: the time is that of the launch.
    return GpuCase(
        ("update_delayed_scales_",),
        lambda _: tensors(),
        lambda lists: update_delayed_scales_(*lists, [E4M3_MAX] * count),
        {},
        check,
        bytes=8.0 * count * (HISTORY + 2),
    )


row(
    f"cuda/update_delayed_scales_/{2 * LAYERS}",
    f"the end of a step of delayed scaling: {2 * LAYERS} histories of {HISTORY} amaxes",
    at_most(LAUNCH, "us"),
    device="cuda",
    quick=True,
)(partial(_delayed_case, 2 * LAYERS))
for _op, _number in (("inv_scale", 1), ("clip_coef", 1000), ("scale_from_amax_", FEW_NUMBERS)):
    row(
        f"cuda/{_op}/{_number}",
        f"{_op} of {_number} numbers",
        at_most(LAUNCH, "us"),
        device="cuda",
        quick=True,
    )(partial(_number_case, _op, _number))
