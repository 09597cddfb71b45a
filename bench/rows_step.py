"""step: the whole optimizer step (unscale, clip, AdamW, write-back) against torch's pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mixprec.ops import grad_stats_, inv_scale
from mixprec.optim import SGD

from . import steps, verify
from .registry import Case, Medians, at_most, row, times_faster, times_the_time
from .steps import (
    CHECKED_SCALE,
    MAX_NORM,
    TIMED_SCALE,
    Params,
    Shapes,
    bytes_per_element,
    gpt_shapes,
    parameters,
)

MANY: Shapes = [(1000,)] * 1000
ONE: Shapes = [(1_000_000,)]


def _case(shapes: Shapes, dtype: torch.dtype, per_element: int, **options: Any) -> Case:
    _, ours = steps.ours(parameters(shapes, dtype), TIMED_SCALE, **options)
    params = parameters(shapes, dtype)
    if dtype == torch.float32:
        name, rival = "torch unscale, clip, fused", steps.torch_fp32(params, TIMED_SCALE)
    else:
        name, (_, rival) = "torch fp32 copies, fused", steps.torch_masters(params, TIMED_SCALE)
    elements = steps.elements(shapes)
    check = partial(steps.check, shapes, dtype, **options)
    return Case(ours, {name: rival}, check, bytes=per_element * elements)


row(
    "step/fp32/gpt",
    "unscale + clip + AdamW, fp32, 12.7M params in 52 tensors",
    times_faster(1.4),
)(partial(_case, gpt_shapes(), torch.float32, bytes_per_element(4, 4, 8, 0)))
row(
    "step/bf16/gpt",
    "unscale + clip + AdamW + write-back, bf16 with fp32 masters, 12.7M params in 52 tensors",
    times_faster(1.6),
)(partial(_case, gpt_shapes(), torch.bfloat16, bytes_per_element(2, 2, 8, 4)))
row(
    "step/bf16/remainder16",
    "the same with 16 remainder bits in place of the masters",
    times_faster(1.6),
)(
    partial(
        *(_case, gpt_shapes(), torch.bfloat16, bytes_per_element(2, 2, 8, 2)),
        master_weights="remainder16",
    )
)
row(
    "step/bf16/stochastic",
    "the same with bf16 moments and no masters, rounded stochastically: half the memory",
    times_faster(1.0),
)(
    partial(
        *(_case, gpt_shapes(), torch.bfloat16, bytes_per_element(2, 2, 4, 0)),
        stochastic_rounding=True,
        state_dtype=torch.bfloat16,
    )
)
row(
    "step/fp32/many",
    "unscale + clip + AdamW, fp32, 1,000 tensors of 1,000",
    times_faster(2.0),
    quick=True,
)(partial(_case, MANY, torch.float32, bytes_per_element(4, 4, 8, 0)))


def _per_tensor(medians: Medians) -> float:
    return (medians["ours"] - medians["ours, one tensor"]) / len(MANY)


@row(
    "step/fp32/per-tensor",
    "time per tensor: 1,000 tensors of 1,000, less one tensor of 1M",
    at_most(3.0, "us", _per_tensor),
)
def _per_tensor_case() -> Case:
    _, many = steps.ours(parameters(MANY, torch.float32), TIMED_SCALE)
    _, one = steps.ours(parameters(ONE, torch.float32), TIMED_SCALE)
    return Case(many, {"ours, one tensor": one}, partial(steps.check, MANY, torch.float32))


@row(
    "step/sgd/gpt",
    "unscale + clip + SGD with momentum, fp32, 12.7M params in 52 tensors",
    times_faster(1.4),
)
def _sgd_case() -> Case:
    def ours(scale: float) -> tuple[Params, Callable[[], None]]:
        params = steps.scale_grads(parameters(gpt_shapes(), torch.float32), scale)
        optimizer = SGD(params, lr=1e-3, momentum=0.9, max_grad_norm=MAX_NORM)
        return params, steps.with_scaler(optimizer, params, scale)

    def theirs(scale: float) -> tuple[Params, Callable[[], None]]:
        params = steps.scale_grads(parameters(gpt_shapes(), torch.float32), scale)
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
        return params, steps.torch_pipeline(params, optimizer, scale)

    def check() -> str | None:
        (got, step), (expected, other) = ours(CHECKED_SCALE), theirs(CHECKED_SCALE)
        step(), other()
        return verify.close("params", got, expected, rtol=1e-6, atol=1e-6)

    params, step = ours(TIMED_SCALE)
    rivals = {"torch unscale, clip, fused": theirs(TIMED_SCALE)[1]}
    elements = sum(p.numel() for p in params)
    return Case(step, rivals, check, bytes=bytes_per_element(4, 4, 4, 0) * elements)


@row(
    "step/skipped",
    "a step that overflows, against reading its gradients once",
    times_the_time(1.1),
)
def _skipped_case() -> Case:
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
    return Case(step, first_pass, check, bytes=4 * sum(p.numel() for p in params))
