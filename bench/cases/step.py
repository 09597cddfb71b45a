"""Whole optimizer steps (unscale, clip, update, write-back) against torch's pipeline, on the CPU
with a small GPT and on the GPU with a billion parameters too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from mixprec.ops import grad_stats_, inv_scale

from .. import device, verify
from . import steps
from .registry import (
    Medians,
    Workload,
    at_most,
    case,
    times_faster,
    times_faster_than,
    times_the_time,
)
from .steps import TIMED_SCALE, Shapes, gpt_shapes, parameters

MANY: Shapes = [(1000,)] * 1000
ONE: Shapes = [(1_000_000,)]
MATRICES: Shapes = [(384, 128), (128, 128), (512, 128), (128, 512)]
TINY: Shapes = gpt_shapes(1, 8, 16)
BILLION = (18, 2048, 50304)  # layers, width, vocabulary: 1.01e9 elements
SIZES = {"1e9": gpt_shapes(*BILLION), "gpt-12.7M": gpt_shapes(), "1000x1000": MANY}
SHARED_OPS = ("grad_stats_", "clip_coef", "inv_scale", "update_scale_")
TORCH_FP32, TORCH_MASTERS = "torch unscale, clip, fused", "torch fp32 copies, fused"
Step = Callable[[], None]


class Bytes(NamedTuple):
    """Of an element: the parameter, its gradient, the moments and the FP32 master."""

    param: int
    grad: int
    moments: int
    master: int

    def moved(self) -> int:
        return steps.bytes_per_element(*self)

    def held(self) -> int:
        """By ours, by torch's (with FP32 copies of everything for 16 bits), and while both are
        set up."""
        theirs = self.param + self.grad + (8 if self.param == 4 else 16)
        return sum(self) + theirs + 4


FP32, MASTERS = Bytes(4, 4, 8, 0), Bytes(2, 2, 8, 4)
REMAINDER, STOCHASTIC, SGD = Bytes(2, 2, 8, 2), Bytes(2, 2, 4, 0), Bytes(4, 4, 4, 0)
CODES: dict[str, Any] = {"state_dtype": "int8"}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True, "state_dtype": torch.bfloat16}


def shapes_on_gpu(shapes: Shapes, size: Bytes) -> Shapes:
    """Those of a billion parameters with fewer layers where memory is short; tiny in a dry run."""
    if device.DRY_RUN:
        return TINY
    if shapes is not SIZES["1e9"]:
        return shapes
    layers, width, vocabulary = BILLION
    room = 0.8 * device.free_bytes() / size.held()
    smaller = (gpt_shapes(n, width, vocabulary) for n in range(layers, 0, -1))
    fitting = (found for found in smaller if steps.elements(found) <= room)
    return next(fitting, gpt_shapes(1, width, vocabulary))


def _where(on_gpu: bool) -> str:
    return device.DEVICE.type if on_gpu else "cpu"


def _adamw(
    on_gpu: bool, full: Shapes, dtype: torch.dtype, size: Bytes, options: dict[str, Any]
) -> Workload:
    where = _where(on_gpu)
    shapes = shapes_on_gpu(full, size) if on_gpu else full
    few = gpt_shapes() if full is SIZES["1e9"] and not device.DRY_RUN else shapes

    def inputs(_: int) -> dict[str, Step]:
        mine = steps.ours(parameters(shapes, dtype, where), TIMED_SCALE, **options)[1]
        params = parameters(shapes, dtype, where)
        if dtype == torch.float32:
            return {"ours": mine, "torch": steps.torch_fp32(params, TIMED_SCALE)}
        return {"ours": mine, "torch": steps.torch_masters(params, TIMED_SCALE)[1]}

    return Workload(
        lambda step: step["ours"](),
        {TORCH_FP32 if dtype == torch.float32 else TORCH_MASTERS: lambda step: step["torch"]()},
        partial(steps.check, few, dtype, where, **options),
        inputs,
        ops=("adamw_", *SHARED_OPS) if on_gpu else (),
        bytes=float(size.moved() * steps.elements(shapes)),
    )


def _codes() -> Workload:
    """8-bit moments against FP32 ones: of the same step."""
    shapes, (bf16, cpu) = gpt_shapes(), (torch.bfloat16, "cpu")

    def inputs(_: int) -> dict[str, Step]:
        kinds = {"ours": CODES, "fp32 moments": {}}
        return {
            name: steps.ours(parameters(shapes, bf16, cpu), TIMED_SCALE, **options)[1]
            for name, options in kinds.items()
        }

    return Workload(
        lambda step: step["ours"](),
        {"fp32 moments": lambda step: step["fp32 moments"]()},
        partial(steps.check, shapes, bf16, cpu, **CODES),
        inputs,
        bytes=float(Bytes(2, 2, 2, 4).moved() * steps.elements(shapes)),
    )


def _other_libraries() -> Workload:
    """The step alone, without masters: AdamW8bit of torchao and of bitsandbytes."""
    shapes = gpt_shapes()
    options: dict[str, Any] = {"stochastic_rounding": True, "state_dtype": "int8"}
    mine = steps.ours(parameters(shapes, torch.bfloat16), TIMED_SCALE, **options)[1]
    theirs = steps.adamw_8bit(parameters(shapes, torch.bfloat16))
    return Workload(mine, theirs, partial(steps.check, shapes, torch.bfloat16, "cpu", **options))


def _sgd(on_gpu: bool, full: Shapes) -> Workload:
    where = _where(on_gpu)
    shapes = shapes_on_gpu(full, SGD) if on_gpu else full
    few = gpt_shapes() if full is SIZES["1e9"] and not device.DRY_RUN else shapes

    def inputs(_: int) -> dict[str, Step]:
        pair = (("ours", True), ("torch", False))
        return {name: steps.sgd(shapes, TIMED_SCALE, where, mine=mine)[1] for name, mine in pair}

    return Workload(
        lambda step: step["ours"](),
        {TORCH_FP32: lambda step: step["torch"]()},
        partial(steps.check_sgd, few, where),
        inputs,
        ops=("sgd_", *SHARED_OPS) if on_gpu else (),
        bytes=float(SGD.moved() * steps.elements(shapes)),
    )


# On the CPU


def _muon() -> Workload:
    ours, fp8, theirs = (
        steps.muon(MATRICES, mine=mine, **options)[1]
        for mine, options in ((True, {}), (True, {"ns_dtype": "fp8"}), (False, {}))
    )
    return Workload(
        ours,
        {"torch.optim.Muon": theirs, "ours, FP8 products": fp8},
        partial(steps.check_muon, MATRICES),
    )


def _per_tensor(medians: Medians) -> float:
    return (medians["ours"] - medians["ours, one tensor"]) / len(MANY)


def _many_and_one() -> Workload:
    _, many = steps.ours(parameters(MANY, torch.float32), TIMED_SCALE)
    _, one = steps.ours(parameters(ONE, torch.float32), TIMED_SCALE)
    return Workload(many, {"ours, one tensor": one}, partial(steps.check, MANY, torch.float32))


def _skipped() -> Workload:
    params = parameters(gpt_shapes(), torch.float32)
    steps.gradients(params)[-1][-1] = float("nan")
    _, step = steps.ours(params, TIMED_SCALE)
    grads = steps.gradients(params)
    scale, found_inf = inv_scale(torch.tensor(TIMED_SCALE)), torch.zeros(())
    sum_sq = torch.empty(len(grads), dtype=torch.float64)
    counts = torch.empty((len(grads), 4), dtype=torch.int64)

    def check() -> str | None:
        before = [p.detach().clone() for p in params]
        step()
        unchanged = (verify.equal("a param", *pair) for pair in zip(params, before, strict=True))
        return verify.first(*unchanged)

    first_pass = {"the first pass": lambda: grad_stats_(grads, scale, found_inf, sum_sq, counts)}
    return Workload(step, first_pass, check, bytes=4 * sum(p.numel() for p in params))


_LIST = "12.7M params in 52 tensors"
_ON_CPU: tuple[tuple[str, str, float, Shapes, torch.dtype, Bytes, dict[str, Any]], ...] = (
    # name, what, times the baseline, shapes, dtype, bytes, options
    ("fp32/gpt", f"unscale + clip + AdamW, fp32, {_LIST}", 1.45,
     SIZES["gpt-12.7M"], torch.float32, FP32, {}),
    ("bf16/gpt", f"unscale + clip + AdamW + write-back, bf16 with fp32 masters, {_LIST}", 1.7,
     SIZES["gpt-12.7M"], torch.bfloat16, MASTERS, {}),
    ("bf16/remainder16", "the same with 16 remainder bits in place of the masters", 1.7,
     SIZES["gpt-12.7M"], torch.bfloat16, REMAINDER, {"master_weights": "remainder16"}),
    ("bf16/stochastic",
     "the same with bf16 moments and no masters, rounded stochastically: half the memory", 1.0,
     SIZES["gpt-12.7M"], torch.bfloat16, STOCHASTIC, ROUNDED),
    ("fp32/many", "unscale + clip + AdamW, fp32, 1,000 tensors of 1,000", 2.0,
     MANY, torch.float32, FP32, {}),
)  # fmt: skip
for _name, _what, _times, _shapes, _dtype, _size, _options in _ON_CPU:
    case(
        f"step/{_name}",
        _what,
        times_faster(_times),
        partial(_adamw, False, _shapes, _dtype, _size, _options),
        quick=_name == "fp32/many",
    )
case(
    "step/bf16/int8",
    f"unscale + clip + AdamW, 8-bit moments against fp32 ones, bf16 with fp32 masters, {_LIST}",
    times_the_time(1.2),
    _codes,
)
case(
    "step/bf16/int8/others",
    f"the same without masters, against AdamW8bit of other libraries, {_LIST}",
    times_faster(8.0),
    _other_libraries,
)
case(
    "step/fp32/per-tensor",
    "time per tensor: 1,000 tensors of 1,000, less one tensor of 1M",
    at_most(3.0, "us", _per_tensor),
    _many_and_one,
)
case(
    "step/sgd/gpt",
    f"unscale + clip + SGD with momentum, fp32, {_LIST}",
    times_faster(1.4),
    partial(_sgd, False, gpt_shapes()),
)
case(
    "step/muon",
    "Muon: momentum, 5 Newton-Schulz iterations, update; fp32, 4 matrices, 0.2M params",
    times_faster_than("torch.optim.Muon", 2.0),
    _muon,
)
case(
    "step/skipped",
    "a step that overflows, against reading its gradients once",
    times_the_time(1.1),
    _skipped,
)

# On the GPU

_ON_GPU: tuple[tuple[str, str, torch.dtype, Bytes, float, dict[str, Any]], ...] = (
    # name, what, dtype, bytes, times the baseline, options
    ("bf16-masters", "bf16 with fp32 masters", torch.bfloat16, MASTERS, 1.9, {}),
    ("fp32", "fp32", torch.float32, FP32, 1.4, {}),
    ("remainder16", "bf16 with 16 remainder bits for masters", torch.bfloat16, REMAINDER, 1.9,
     {"master_weights": "remainder16"}),
    ("stochastic", "bf16, moments too, rounded stochastically", torch.bfloat16, STOCHASTIC, 1.9,
     ROUNDED),
)  # fmt: skip
for _name, _what, _dtype, _size, _times, _options in _ON_GPU:
    for _count in SIZES if _name == "bf16-masters" else ("1e9",):
        case(
            f"cuda/adamw_/{_name}/{_count}",
            f"unscale + clip + AdamW + write-back, {_what}, {_count} parameters",
            times_faster(_times if _count == "1e9" else 1.0),
            partial(_adamw, True, SIZES[_count], _dtype, _size, _options),
            share=0.88 if _count == "1e9" else None,
            quick=True,
        )
case(
    "cuda/sgd_/fp32/1e9",
    "unscale + clip + SGD with momentum, fp32, 1e9 parameters",
    times_faster(1.4),
    partial(_sgd, True, SIZES["1e9"]),
    share=0.88,
    quick=True,
)
