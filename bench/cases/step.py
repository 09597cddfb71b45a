"""Whole optimizer steps (unscale, clip, update, write-back) against torch's pipeline, on the CPU
with a small GPT and on the GPU with a billion parameters too."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

import mixprec
from mixprec.ops import grad_stats_, inv_scale

from .. import device, verify
from . import steps
from .registry import (
    Medians,
    Target,
    Workload,
    at_most,
    case,
    times_faster,
    times_faster_than,
    times_the_time,
)
from .steps import TIMED_SCALE, Shapes, Step, gpt_shapes, parameters

MANY: Shapes = [(1000,)] * 1000
ONE: Shapes = [(1_000_000,)]
MATRICES: Shapes = [(384, 128), (128, 128), (512, 128), (128, 512)]
TINY: Shapes = gpt_shapes(1, 8, 16)
BILLION = (18, 2048, 50304)  # layers, width, vocabulary: 1.01e9 elements
SIZES = {"1e9": gpt_shapes(*BILLION), "gpt-12.7M": gpt_shapes(), "1000x1000": MANY}
GPT = SIZES["gpt-12.7M"]
SHARED_OPS = ("grad_stats_", "clip_coef", "inv_scale", "update_scale_")
TORCH_FP32, TORCH_MASTERS = "torch unscale, clip, fused", "torch fp32 copies, fused"


class Bytes(NamedTuple):
    """Of an element: the parameter, its gradient, the moments and the FP32 master."""

    param: int
    grad: int
    moments: int
    master: int

    def moved(self) -> int:
        """The gradient is read twice, of the rest the old is read and the new written, except that
        a param with an FP32 master is only written."""
        params = self.param if self.master == 4 else 2 * self.param
        return 2 * self.grad + params + 2 * (self.moments + self.master)

    def held(self) -> int:
        """By ours, by torch's (with FP32 copies of everything for 16 bits), and while both are
        set up."""
        theirs = self.param + self.grad + (8 if self.param == 4 else 16)
        return sum(self) + theirs + 4


class Kind(NamedTuple):
    """A step: the dtype of the parameters, what it holds, and the options of our optimizer."""

    dtype: torch.dtype
    size: Bytes
    options: dict[str, Any]
    optimizer: str = "adamw"
    what: str = ""  # as what another kind is compared with


BF16, INT8 = torch.bfloat16, {"state_dtype": "int8"}
REMAINDER16, REMAINDER8 = ({"master_weights": f"remainder{bits}"} for bits in (16, 8))
STOCHASTIC = {"stochastic_rounding": True, "state_dtype": BF16}
KINDS = {
    "fp32": Kind(torch.float32, Bytes(4, 4, 8, 0), {}),
    "masters": Kind(BF16, Bytes(2, 2, 8, 4), {}, what="fp32 moments"),
    "remainder16": Kind(BF16, Bytes(2, 2, 8, 2), REMAINDER16),
    "stochastic": Kind(BF16, Bytes(2, 2, 4, 0), STOCHASTIC),
    "int8": Kind(BF16, Bytes(2, 2, 2, 4), INT8),
    "remainder8": Kind(BF16, Bytes(2, 2, 2, 1), REMAINDER8 | INT8),
    "remainder16-int8": Kind(BF16, Bytes(2, 2, 2, 2), REMAINDER16 | INT8, what="16 remainder bits"),
    "sgd": Kind(torch.float32, Bytes(4, 4, 4, 0), {}, "sgd"),
}


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


def _workload(on_gpu: bool, full: Shapes, kind: Kind, rival: Kind | None = None) -> Workload:
    """Against torch's pipeline, or another kind of ours."""
    where, dtype, name = device.where(on_gpu), kind.dtype, kind.optimizer
    shapes = shapes_on_gpu(full, kind.size) if on_gpu else full
    few = GPT if full is SIZES["1e9"] and not device.DRY_RUN else shapes

    def inputs(_: int) -> dict[str, Step]:
        mine, theirs = (parameters(shapes, dtype, where) for _ in range(2))
        if rival is not None:
            other = steps.ours(theirs, **rival.options)[1]
        else:
            other = steps.torchs(theirs, kind=name)[1]
        return {"ours": steps.ours(mine, kind=name, **kind.options)[1], "other": other}

    torchs = TORCH_FP32 if dtype == torch.float32 else TORCH_MASTERS
    return Workload(
        lambda step: step["ours"](),
        {torchs if rival is None else rival.what: lambda step: step["other"]()},
        partial(steps.check, few, dtype, where, name, **kind.options),
        inputs,
        ops=(f"{name}_", *SHARED_OPS) if on_gpu else (),
        bytes=float(kind.size.moved() * steps.elements(shapes)),
    )


# On the CPU


def _muon() -> Workload:
    def make(optimizer: Any, **options: Any) -> tuple[steps.Params, Step]:
        params = parameters(MATRICES, torch.float32)
        return params, optimizer(params, lr=1e-3, **options).step

    def check() -> str | None:
        """torch rounds every product to bf16: updates are up to 3e-4, and differ by about 1.5%."""
        (got, step), (expected, other) = make(mixprec.optim.Muon), make(torch.optim.Muon)
        step(), other()
        return verify.close("params", got, expected, rtol=0.0, atol=2e-5)

    theirs = {
        "torch.optim.Muon": make(torch.optim.Muon)[1],
        "ours, FP8 products": make(mixprec.optim.Muon, ns_dtype="fp8")[1],
    }
    return Workload(make(mixprec.optim.Muon)[1], theirs, check)


def _per_tensor(medians: Medians) -> float:
    return (medians["ours"] - medians["ours, one tensor"]) / len(MANY)


def _many_and_one() -> Workload:
    many, one = (steps.ours(parameters(shapes, torch.float32))[1] for shapes in (MANY, ONE))
    return Workload(many, {"ours, one tensor": one}, partial(steps.check, MANY, torch.float32))


def _skipped() -> Workload:
    params = parameters(GPT, torch.float32)
    steps.gradients(params)[-1][-1] = float("nan")
    _, step = steps.ours(params)
    grads = steps.gradients(params)
    scale, found_inf = inv_scale(torch.tensor(TIMED_SCALE)), torch.zeros(())
    sum_sq = torch.empty(len(grads), dtype=torch.float64)
    counts = torch.empty((len(grads), 4), dtype=torch.int64)

    def check() -> str | None:
        before = [p.detach().clone() for p in params]
        step()
        return verify.close("params", params, before, rtol=0.0, atol=0.0)

    first_pass = {"the first pass": lambda: grad_stats_(grads, scale, found_inf, sum_sq, counts)}
    return Workload(step, first_pass, check, bytes=4 * sum(p.numel() for p in params))


def _on_cpu(shapes: Shapes, kind: str, rival: str | None = None) -> partial[Workload]:
    return partial(_workload, False, shapes, KINDS[kind], KINDS[rival] if rival else None)


_LIST = "12.7M params in 52 tensors"
_ON_CPU: tuple[tuple[str, Target, Any, str], ...] = (
    ("fp32/gpt", times_faster(1.45), _on_cpu(GPT, "fp32"),
     f"unscale + clip + AdamW, fp32, {_LIST}"),
    ("bf16/gpt", times_faster(1.7), _on_cpu(GPT, "masters"),
     f"unscale + clip + AdamW + write-back, bf16 with fp32 masters, {_LIST}"),
    ("bf16/remainder16", times_faster(1.7), _on_cpu(GPT, "remainder16"),
     "the same with 16 remainder bits in place of the masters"),
    ("bf16/stochastic", times_faster(1.0), _on_cpu(GPT, "stochastic"),
     "the same with bf16 moments and no masters, rounded stochastically: half the memory"),
    ("fp32/many", times_faster(2.0), _on_cpu(MANY, "fp32"),
     "unscale + clip + AdamW, fp32, 1,000 tensors of 1,000"),
    ("bf16/int8", times_the_time(1.2), _on_cpu(GPT, "int8", "masters"),
     f"unscale + clip + AdamW, 8-bit moments against fp32 ones, bf16 with fp32 masters, {_LIST}"),
    ("bf16/remainder8", times_the_time(1.2), _on_cpu(GPT, "remainder8", "remainder16-int8"),
     f"unscale + clip + AdamW with 8-bit moments, 8 remainder bits against 16, {_LIST}"),
    ("fp32/per-tensor", at_most(3.0, "us", _per_tensor), _many_and_one,
     "time per tensor: 1,000 tensors of 1,000, less one tensor of 1M"),
    ("sgd/gpt", times_faster(1.4), _on_cpu(GPT, "sgd"),
     f"unscale + clip + SGD with momentum, fp32, {_LIST}"),
    ("muon", times_faster_than("torch.optim.Muon", 2.0), _muon,
     "Muon: momentum, 5 Newton-Schulz iterations, update; fp32, 4 matrices, 0.2M params"),
    ("skipped", times_the_time(1.1), _skipped,
     "a step that overflows, against reading its gradients once"),
)  # fmt: skip
for _name, _target, _make, _what in _ON_CPU:
    case(f"step/{_name}", _what, _target, _make, quick=_name == "fp32/many")

# On the GPU

_STEP = "unscale + clip + AdamW + write-back, bf16"
_ON_GPU = (
    # name, kind, what, number of parameters, times the baseline
    ("adamw_/bf16-masters", "masters", f"{_STEP} with fp32 masters", "1e9", 1.9),
    ("adamw_/bf16-masters", "masters", f"{_STEP} with fp32 masters", "gpt-12.7M", 1.0),
    ("adamw_/bf16-masters", "masters", f"{_STEP} with fp32 masters", "1000x1000", 1.0),
    ("adamw_/fp32", "fp32", "unscale + clip + AdamW, fp32", "1e9", 1.4),
    ("adamw_/remainder16", "remainder16", f"{_STEP} with 16 bits for masters", "1e9", 1.9),
    ("adamw_/stochastic", "stochastic", f"{_STEP}, moments too, no masters", "1e9", 1.9),
    ("adamw_/int8", "int8", f"{_STEP} with fp32 masters and 8-bit moments", "1e9", 1.9),
    ("sgd_/fp32", "sgd", "unscale + clip + SGD with momentum, fp32", "1e9", 1.4),
)
for _name, _kind, _what, _count, _times in _ON_GPU:
    _make = partial(_workload, True, SIZES[_count], KINDS[_kind])
    _share, _what = 0.88 if _count == "1e9" else None, f"{_what}, {_count} parameters"
    case(f"cuda/{_name}/{_count}", _what, times_faster(_times), _make, share=_share, quick=True)
