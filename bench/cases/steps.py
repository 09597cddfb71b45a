"""Whole optimizer steps, ours and torch's, on any device: what the cases of step.py are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mixprec
from mixprec.ops import join_master
from mixprec.optim import SGD, AdamW

from .. import verify

Shapes = list[tuple[int, ...]]
Params = list[torch.nn.Parameter]
Step = Callable[[], None]
MAX_NORM = 1.0


# Ours, torch's and what both are given.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, ADAMW),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
# Timing repeats the step on one set of gradients, which unscaling would shrink to nothing at any
# other loss scale; the values are compared at a real one.
TIMED_SCALE, CHECKED_SCALE = 1.0, 2.0**16


def gpt_shapes(layers: int = 4, width: int = 512, vocabulary: int = 256) -> Shapes:
    """The parameters of a GPT; of the one that is meant by default: 52 tensors, 12.7M elements."""
    block: Shapes = [(width,), (width,), (width,), (width,)]  # two norms
    for rows, columns in ((3, 1), (1, 1), (4, 1), (1, 4)):
        block += [(rows * width, columns * width), (rows * width,)]
    ends: Shapes = [(vocabulary, width), (width,), (width,), (vocabulary,)]
    return block * layers + ends


def elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def parameters(
    shapes: Shapes, dtype: torch.dtype, device: str = "cpu", scale: float = TIMED_SCALE
) -> Params:
    """Parameters with gradients of a loss scaled by `scale`, the same ones at every call."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        value, grad = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        param = torch.nn.Parameter((0.02 * value).to(dtype))
        param.grad = grad.to(dtype) * scale
        params.append(param)
    return params


def gradients(params: Params) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def ours(
    params: Params, scale: float = TIMED_SCALE, kind: str = "adamw", **options: Any
) -> tuple[Any, Step]:
    """The optimizer, and a step of it with clipping by a scaler."""
    optimizer = KINDS[kind][0](params, max_grad_norm=MAX_NORM, **KINDS[kind][2], **options)
    device = params[0].device
    scaler = mixprec.GradScaler(device.type, init_scale=scale, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))  # a scaler makes its tensors at the first loss

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return optimizer, step


def torchs(params: Params, scale: float = TIMED_SCALE, kind: str = "adamw") -> tuple[Params, Step]:
    """unscale_, clip_grad_norm_, fused update: torch's own pipeline; and the parameters that it
    steps. Of 16-bit ones, as is usual, FP32 copies are stepped, then copied back."""
    stepped = params
    if params[0].dtype != torch.float32:
        stepped = [torch.nn.Parameter(p.detach().float()) for p in params]
        for copy in stepped:
            copy.grad = torch.empty_like(copy)
    optimizer = KINDS[kind][1](stepped, fused=True, **KINDS[kind][2])
    device = params[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))

    @torch.no_grad()
    def step() -> None:
        if stepped is not params:
            torch._foreach_copy_(gradients(stepped), gradients(params))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(stepped, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if stepped is not params:
            torch._foreach_copy_([*params], [*stepped])

    return stepped, step


def check(
    shapes: Shapes, dtype: torch.dtype, device: str = "cpu", kind: str = "adamw", **options: Any
) -> str | None:
    """One step of ours and of torch's from the same state: the same parameters, and masters."""
    mine, other = (parameters(shapes, dtype, device, CHECKED_SCALE) for _ in range(2))
    optimizer, step = ours(mine, CHECKED_SCALE, kind, **options)
    expected, theirs = torchs(other, CHECKED_SCALE, kind)
    step(), theirs()
    if options.get("stochastic_rounding"):
        # Up or down, but never by more than the distance of two neighbours.
        low = [m.float() for m in mine]
        return verify.close("params", low, expected, rtol=2.0**-7, atol=1e-6)
    masters = [_master(p, optimizer.state[p]) for p in mine]
    rounded = (verify.equal("a param", p, m.to(dtype)) for p, m in zip(mine, masters, strict=True))
    # A step moves a parameter by about lr = 1e-3: a thousandth of that is far above rounding.
    # Weights of 24 bits have neighbours that are up to 2^-15 of them apart.
    rtol = 2.0**-15 if options.get("master_weights") == "remainder8" else 1e-6
    close = verify.close("params", masters, expected, rtol=rtol, atol=1e-6)
    return verify.first(close, *(rounded if "master" in optimizer.state[mine[0]] else ()))


def _master(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    if "remainder" in state:
        return join_master(param, state["remainder"])
    return state.get("master", param)
