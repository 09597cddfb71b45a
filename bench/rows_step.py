"""step: the whole optimizer step (unscale, clip, AdamW, write-back) against torch's pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec.ops import grad_stats_, inv_scale, join_master
from mixprec.optim import SGD, AdamW

from . import verify
from .registry import Case, Medians, at_most, row, times_faster, times_the_time

MAX_NORM = 1.0
SETTINGS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # noqa: C408
# Timing repeats the step on one set of gradients, which unscaling would shrink to nothing at any
# other loss scale; the values are compared at a real one.
TIMED_SCALE, CHECKED_SCALE = 1.0, 2.0**16


def gpt_shapes(layers: int = 4, width: int = 512) -> list[tuple[int, ...]]:
    """The parameters of a small GPT: 52 tensors, 12.7M elements."""
    block: list[tuple[int, ...]] = [(width,), (width,), (width,), (width,)]  # two norms
    for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
        block += [(rows * width, columns * width), (rows * width,)]
    ends: list[tuple[int, ...]] = [(256, width), (width,), (width,), (256,)]
    return block * layers + ends


MANY = [(1000,)] * 1000
ONE = [(1_000_000,)]


def _parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients, the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        value, grad = (torch.randn(shape, generator=generator) for _ in range(2))
        param = torch.nn.Parameter((0.02 * value).to(dtype))
        param.grad = (TIMED_SCALE * grad).to(dtype)
        params.append(param)
    return params


def _ours(
    params: list[torch.nn.Parameter], scale: float, **options: Any
) -> tuple[AdamW, Callable[[], None]]:
    optimizer = AdamW(params, max_grad_norm=MAX_NORM, **SETTINGS, **options)
    return optimizer, _with_scaler(optimizer, scale)


def _with_scaler(optimizer: torch.optim.Optimizer, scale: float) -> Callable[[], None]:
    scaler = _initialized(mixprec.GradScaler("cpu", init_scale=scale, growth_interval=2**30))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _torch_fp32(params: list[torch.nn.Parameter], scale: float) -> Callable[[], None]:
    """unscale_, clip_grad_norm_, fused AdamW: torch's own pipeline for fp32 parameters."""
    return _torch_pipeline(params, torch.optim.AdamW(params, fused=True, **SETTINGS), scale)


def _torch_pipeline(
    params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, scale: float
) -> Callable[[], None]:
    scaler = _initialized(torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2**30))

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def _torch_masters(
    params: list[torch.nn.Parameter], scale: float
) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
    """The usual recipe for 16-bit parameters: fp32 copies are stepped, then copied back."""
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    step_masters = _torch_fp32(masters, scale)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        step_masters()
        torch._foreach_copy_(params, masters)

    return masters, step


def _initialized(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    scaler.scale(torch.zeros(()))  # a scaler makes its tensors at the first loss
    return scaler


def _scale_grads(params: list[torch.nn.Parameter], scale: float) -> list[torch.nn.Parameter]:
    for p in params:
        p.grad.mul_(scale / TIMED_SCALE)
    return params


def _check(shapes: list[tuple[int, ...]], dtype: torch.dtype, **options: Any) -> str | None:
    """One step of ours and of torch's from the same state: the same parameters, and masters."""
    mine = _scale_grads(_parameters(shapes, dtype), CHECKED_SCALE)
    other = _scale_grads(_parameters(shapes, dtype), CHECKED_SCALE)
    optimizer, ours = _ours(mine, CHECKED_SCALE, **options)
    ours()
    if dtype == torch.float32:
        _torch_fp32(other, CHECKED_SCALE)()
        got, expected = mine, other
    else:
        expected, theirs = _torch_masters(other, CHECKED_SCALE)
        theirs()
        if options.get("stochastic_rounding"):
            # Up or down, but never by more than the distance of two neighbours.
            return verify.close("params", mine, expected, rtol=2.0**-7, atol=1e-6)
        got = [_master(p, optimizer.state[p]) for p in mine]
        if "master" in optimizer.state[mine[0]]:
            pairs = zip(mine, got, strict=True)
            rounded = (verify.equal("a param", p, m.to(dtype)) for p, m in pairs)
            if (wrong := verify.first(*rounded)) is not None:
                return wrong
    # A step moves a parameter by about lr = 1e-3: a thousandth of that is far above rounding.
    return verify.close("params", got, expected, rtol=1e-6, atol=1e-6)


def _master(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    return state["master"] if "master" in state else join_master(param, state["remainder"])


def _bytes(param: int, grad: int, moments: int, master: int) -> int:
    """Bytes per element: the gradient is read twice, of the rest the old is read and the new
    written, except that a param with an FP32 master is only written."""
    read_param = 0 if master == 4 else param
    return 2 * grad + read_param + param + 2 * (moments + master)


def _case(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, per_element: int, **options: Any
) -> Case:
    _, ours = _ours(_parameters(shapes, dtype), TIMED_SCALE, **options)
    params = _parameters(shapes, dtype)
    if dtype == torch.float32:
        name, rival = "torch unscale, clip, fused", _torch_fp32(params, TIMED_SCALE)
    else:
        name, (_, rival) = "torch fp32 copies, fused", _torch_masters(params, TIMED_SCALE)
    elements = sum(p.numel() for p in params)
    check = partial(_check, shapes, dtype, **options)
    return Case(ours, {name: rival}, check, bytes=per_element * elements)


row(
    "step/fp32/gpt",
    "unscale + clip + AdamW, fp32, 12.7M params in 52 tensors",
    times_faster(1.4),
)(partial(_case, gpt_shapes(), torch.float32, _bytes(4, 4, 8, 0)))
row(
    "step/bf16/gpt",
    "unscale + clip + AdamW + write-back, bf16 with fp32 masters, 12.7M params in 52 tensors",
    times_faster(1.6),
)(partial(_case, gpt_shapes(), torch.bfloat16, _bytes(2, 2, 8, 4)))
row(
    "step/bf16/remainder16",
    "the same with 16 remainder bits in place of the masters",
    times_faster(1.6),
)(partial(*(_case, gpt_shapes(), torch.bfloat16, _bytes(2, 2, 8, 2)), master_weights="remainder16"))
row(
    "step/bf16/stochastic",
    "the same with bf16 moments and no masters, rounded stochastically: half the memory",
    times_faster(1.0),
)(
    partial(
        *(_case, gpt_shapes(), torch.bfloat16, _bytes(2, 2, 4, 0)),
        stochastic_rounding=True,
        state_dtype=torch.bfloat16,
    )
)
row(
    "step/fp32/many",
    "unscale + clip + AdamW, fp32, 1,000 tensors of 1,000",
    times_faster(2.0),
    quick=True,
)(partial(_case, MANY, torch.float32, _bytes(4, 4, 8, 0)))


def _per_tensor(medians: Medians) -> float:
    return (medians["ours"] - medians["ours, one tensor"]) / len(MANY)


@row(
    "step/fp32/per-tensor",
    "time per tensor: 1,000 tensors of 1,000, less one tensor of 1M",
    at_most(3.0, "us", _per_tensor),
)
def _per_tensor_case() -> Case:
    _, many = _ours(_parameters(MANY, torch.float32), TIMED_SCALE)
    _, one = _ours(_parameters(ONE, torch.float32), TIMED_SCALE)
    return Case(many, {"ours, one tensor": one}, partial(_check, MANY, torch.float32))


@row(
    "step/sgd/gpt",
    "unscale + clip + SGD with momentum, fp32, 12.7M params in 52 tensors",
    times_faster(1.4),
)
def _sgd_case() -> Case:
    def ours(scale: float) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
        params = _scale_grads(_parameters(gpt_shapes(), torch.float32), scale)
        optimizer = SGD(params, lr=1e-3, momentum=0.9, max_grad_norm=MAX_NORM)
        return params, _with_scaler(optimizer, scale)

    def theirs(scale: float) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
        params = _scale_grads(_parameters(gpt_shapes(), torch.float32), scale)
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
        return params, _torch_pipeline(params, optimizer, scale)

    def check() -> str | None:
        (got, step), (expected, other) = ours(CHECKED_SCALE), theirs(CHECKED_SCALE)
        step(), other()
        return verify.close("params", got, expected, rtol=1e-6, atol=1e-6)

    params, step = ours(TIMED_SCALE)
    rivals = {"torch unscale, clip, fused": theirs(TIMED_SCALE)[1]}
    elements = sum(p.numel() for p in params)
    return Case(step, rivals, check, bytes=_bytes(4, 4, 4, 0) * elements)


@row(
    "step/skipped",
    "a step that overflows, against reading its gradients once",
    times_the_time(1.1),
)
def _skipped_case() -> Case:
    params = _parameters(gpt_shapes(), torch.float32)
    params[-1].grad[-1] = float("nan")
    _, step = _ours(params, TIMED_SCALE)
    grads = [p.grad for p in params]
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
