"""Whole optimizer steps, ours and torch's, on any device: what the cases of step.py are made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import mixprec
from mixprec.ops import join_master
from mixprec.optim import SGD, AdamW, Muon

from .. import verify
from .registry import NotMeasured

Shapes = list[tuple[int, ...]]
Params = list[torch.nn.Parameter]
MAX_NORM = 1.0
SETTINGS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # noqa: C408
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


def parameters(shapes: Shapes, dtype: torch.dtype, device: str = "cpu") -> Params:
    """Parameters with gradients, the same ones at every call."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        value, grad = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        param = torch.nn.Parameter((0.02 * value).to(dtype))
        param.grad = (TIMED_SCALE * grad).to(dtype)
        params.append(param)
    return params


def scale_grads(params: Params, scale: float) -> Params:
    torch._foreach_mul_(gradients(params), scale / TIMED_SCALE)
    return params


def gradients(params: Params) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def ours(params: Params, scale: float, **options: Any) -> tuple[AdamW, Callable[[], None]]:
    optimizer = AdamW(params, max_grad_norm=MAX_NORM, **SETTINGS, **options)
    return optimizer, with_scaler(optimizer, params, scale)


def sgd(
    shapes: Shapes, scale: float, device: str, *, mine: bool
) -> tuple[Params, Callable[[], None]]:
    """SGD with momentum on parameters of its own: our step, or torch's."""
    params = scale_grads(parameters(shapes, torch.float32, device), scale)
    options: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
    if mine:
        return params, with_scaler(SGD(params, max_grad_norm=MAX_NORM, **options), params, scale)
    return params, torch_pipeline(params, torch.optim.SGD(params, fused=True, **options), scale)


def check_sgd(shapes: Shapes, device: str) -> str | None:
    """One step of ours and of torch's from the same state."""
    (got, step), (expected, other) = (
        sgd(shapes, CHECKED_SCALE, device, mine=mine) for mine in (True, False)
    )
    step(), other()
    return verify.close("params", got, expected, rtol=1e-6, atol=1e-6)


def muon(shapes: Shapes, *, mine: bool, **options: Any) -> tuple[Params, Callable[[], None]]:
    """Muon of matrices of its own: our step, or torch's."""
    params = parameters(shapes, torch.float32)
    kind = Muon if mine else torch.optim.Muon
    return params, kind(params, lr=1e-3, **options).step


def check_muon(shapes: Shapes) -> str | None:
    """One step of ours and of torch's, which rounds every product to bf16: updates are up to
    3e-4, and differ by about 1.5%."""
    (got, step), (expected, other) = (muon(shapes, mine=mine) for mine in (True, False))
    step(), other()
    return verify.close("params", got, expected, rtol=0.0, atol=2e-5)


def with_scaler(
    optimizer: torch.optim.Optimizer, params: Params, scale: float
) -> Callable[[], None]:
    device = params[0].device
    scaler = mixprec.GradScaler(device.type, init_scale=scale, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))  # a scaler makes its tensors at the first loss

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def adamw_8bit(params: Params) -> dict[str, Callable[[], None]]:
    """The step of each library that is installed, on parameters that it does not share."""
    steps: dict[str, Callable[[], None]] = {}
    for name, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        try:
            kind = importlib.import_module(module).AdamW8bit
        except ImportError:
            continue
        own = [torch.nn.Parameter(p.detach().clone()) for p in params]
        for p, q in zip(params, own, strict=True):
            q.grad = p.grad
        steps[f"{name} AdamW8bit"] = kind(own, lr=1e-3).step
    if not steps:
        raise NotMeasured("neither torchao nor bitsandbytes is installed")
    return steps


def torch_fp32(params: Params, scale: float) -> Callable[[], None]:
    """unscale_, clip_grad_norm_, fused AdamW: torch's own pipeline for fp32 parameters."""
    return torch_pipeline(params, torch.optim.AdamW(params, fused=True, **SETTINGS), scale)


def torch_pipeline(
    params: Params, optimizer: torch.optim.Optimizer, scale: float
) -> Callable[[], None]:
    device = params[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=2**30)
    scaler.scale(torch.zeros((), device=device))

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def torch_masters(params: Params, scale: float) -> tuple[Params, Callable[[], None]]:
    """The usual recipe for 16-bit parameters: fp32 copies are stepped, then copied back."""
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    step_masters = torch_fp32(masters, scale)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(gradients(masters), gradients(params))
        step_masters()
        torch._foreach_copy_([*params], [*masters])

    return masters, step


def check(shapes: Shapes, dtype: torch.dtype, device: str = "cpu", **options: Any) -> str | None:
    """One step of ours and of torch's from the same state: the same parameters, and masters."""
    mine = scale_grads(parameters(shapes, dtype, device), CHECKED_SCALE)
    other = scale_grads(parameters(shapes, dtype, device), CHECKED_SCALE)
    optimizer, step = ours(mine, CHECKED_SCALE, **options)
    step()
    got: list[torch.Tensor]
    expected: list[torch.Tensor]
    if dtype == torch.float32:
        torch_fp32(other, CHECKED_SCALE)()
        got, expected = [*mine], [*other]
    else:
        masters, theirs = torch_masters(other, CHECKED_SCALE)
        theirs()
        expected = [*masters]
        if options.get("stochastic_rounding"):
            # Up or down, but never by more than the distance of two neighbours.
            low = [m.float() for m in mine]
            return verify.close("params", low, expected, rtol=2.0**-7, atol=1e-6)
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


def bytes_per_element(param: int, grad: int, moments: int, master: int) -> int:
    """The gradient is read twice, of the rest the old is read and the new written, except that a
    param with an FP32 master is only written."""
    read_param = 0 if master == 4 else param
    return 2 * grad + read_param + param + 2 * (moments + master)
