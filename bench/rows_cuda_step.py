"""Whole optimizer steps on the GPU against torch's pipeline, at a billion parameters and small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mixprec.optim import SGD

from . import gpu, steps, verify
from .gpu_run import GpuCase
from .registry import row, times_faster
from .steps import CHECKED_SCALE, MAX_NORM, TIMED_SCALE, Params, Shapes

Step = Callable[[], None]
SHARED_OPS = ("grad_stats_", "clip_coef", "inv_scale", "update_scale_")
TINY: Shapes = steps.gpt_shapes(1, 8, 16)
BILLION = (18, 2048, 50304)  # layers, width, vocabulary: 1.01e9 elements
MANY: Shapes = [(1000,)] * 1000


def billion(need: int) -> Shapes:
    """The parameters of a GPT: 1.01e9, or as many layers fewer as memory wants, `need` bytes per
    element."""
    if gpu.REHEARSAL:
        return TINY
    layers, width, vocabulary = BILLION
    room = 0.8 * gpu.free_bytes() / need
    fitting = (n for n in range(layers, 1, -1) if _count(n, width, vocabulary) <= room)
    return steps.gpt_shapes(next(fitting, 1), width, vocabulary)


def _count(layers: int, width: int, vocabulary: int) -> int:
    return steps.elements(steps.gpt_shapes(layers, width, vocabulary))


def _shapes(size: str, need: int) -> Shapes:
    return billion(need) if size == "1e9" else TINY if gpu.REHEARSAL else _SIZES[size]


_SIZES: dict[str, Shapes] = {
    "1e9": steps.gpt_shapes(*BILLION),
    "gpt-12.7M": steps.gpt_shapes(),
    "1000x1000": MANY,
}


def _adamw_case(
    size: str, dtype: torch.dtype, per_element: int, held: int, options: dict[str, Any]
) -> GpuCase:
    device = gpu.DEVICE.type
    shapes = _shapes(size, held)

    def inputs(_: int) -> dict[str, Step]:
        mine = steps.ours(steps.parameters(shapes, dtype, device), TIMED_SCALE, **options)[1]
        params = steps.parameters(shapes, dtype, device)
        if dtype == torch.float32:
            return {"ours": mine, "torch": steps.torch_fp32(params, TIMED_SCALE)}
        return {"ours": mine, "torch": steps.torch_masters(params, TIMED_SCALE)[1]}

    rival = "torch unscale, clip, fused" if dtype == torch.float32 else "torch fp32 copies, fused"
    few = TINY if gpu.REHEARSAL else steps.gpt_shapes()
    return GpuCase(
        ("adamw_", *SHARED_OPS),
        inputs,
        lambda s: s["ours"](),
        {rival: lambda s: s["torch"]()},
        lambda: steps.check(few, dtype, device, **options),
        bytes=float(per_element * steps.elements(shapes)),
    )


def _sgd(shapes: Shapes, scale: float, mine: bool) -> tuple[Params, Step]:
    params = steps.scale_grads(steps.parameters(shapes, torch.float32, gpu.DEVICE.type), scale)
    if mine:
        ours = SGD(params, lr=1e-3, momentum=0.9, max_grad_norm=MAX_NORM)
        return params, steps.with_scaler(ours, params, scale)
    theirs = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
    return params, steps.torch_pipeline(params, theirs, scale)


def _sgd_case(per_element: int, held: int) -> GpuCase:
    shapes = billion(held)

    def check() -> str | None:
        few = TINY if gpu.REHEARSAL else steps.gpt_shapes()
        (got, ours), (want, theirs) = (_sgd(few, CHECKED_SCALE, mine) for mine in (True, False))
        ours(), theirs()
        return verify.close("params", got, want, rtol=1e-6, atol=1e-6)

    return GpuCase(
        ("sgd_", *SHARED_OPS),
        lambda _: {m: _sgd(shapes, TIMED_SCALE, m == "ours")[1] for m in ("ours", "torch")},
        lambda s: s["ours"](),
        {"torch unscale, clip, fused": lambda s: s["torch"]()},
        check,
        bytes=float(per_element * steps.elements(shapes)),
    )


_BF16 = torch.bfloat16
_STOCHASTIC = {"stochastic_rounding": True, "state_dtype": torch.bfloat16}
_KINDS: tuple[tuple[str, str, torch.dtype, tuple[int, int, int, int], float, dict[str, Any]], ...]
_KINDS = (
    # name, words, dtype, bytes of (param, grad, moments, master), times the rival, options
    ("bf16-masters", "bf16 with fp32 masters", _BF16, (2, 2, 8, 4), 1.9, {}),
    ("fp32", "fp32", torch.float32, (4, 4, 8, 0), 1.4, {}),
    ("remainder16", "bf16 with 16 remainder bits for masters", _BF16, (2, 2, 8, 2), 1.9,
     {"master_weights": "remainder16"}),
    ("stochastic", "bf16, moments too, rounded stochastically", _BF16, (2, 2, 4, 0), 1.9,
     _STOCHASTIC),
)  # fmt: skip


def _held(param: int, grad: int, moments: int, master: int) -> int:
    """Bytes of memory per element: ours, torch's (with fp32 copies of everything for 16 bit), and
    4 for what setting them up takes."""
    copies = 0 if param == 4 else 16
    theirs = param + grad + (8 if copies == 0 else copies)
    return param + grad + moments + master + theirs + 4


for _name, _words, _dtype, _sizes, _times, _options in _KINDS:
    _per_element, _memory = steps.bytes_per_element(*_sizes), _held(*_sizes)
    for _size in ("1e9", "gpt-12.7M", "1000x1000") if _name == "bf16-masters" else ("1e9",):
        row(
            f"cuda/adamw_/{_name}/{_size}",
            f"unscale + clip + AdamW + write-back, {_words}, {_size} parameters",
            times_faster(_times if _size == "1e9" else 1.0),
            share=0.88 if _size == "1e9" else None,
            device="cuda",
            quick=True,
            bytes=float(_per_element * steps.elements(_SIZES[_size])),
        )(partial(_adamw_case, _size, _dtype, _per_element, _memory, _options))
row(
    "cuda/sgd_/fp32/1e9",
    "unscale + clip + SGD with momentum, fp32, 1e9 parameters",
    times_faster(1.4),
    share=0.88,
    device="cuda",
    quick=True,
    bytes=float(steps.bytes_per_element(4, 4, 4, 0) * steps.elements(_SIZES["1e9"])),
)(partial(_sgd_case, steps.bytes_per_element(4, 4, 4, 0), _held(4, 4, 4, 0)))
