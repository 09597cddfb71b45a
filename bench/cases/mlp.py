"""Whole layers, forward and backward: what a training run feels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import mixprec

from .. import verify
from .registry import Workload, case, times_faster, times_the_time, torchao_float8

TOKENS, WIDTH, HIDDEN = 512, 1024, 4096
# The accuracy that an fp8 layer must keep; the gradient of the first layer has been through the
# casts of both, twice the noise: 3 dB.
OUTPUT_DB, GRADIENT_DB = 18.0, (14.0, 17.0)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def _data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [512, 1024], which needs a gradient as inside a network, and the gradient of y."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(TOKENS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), grad


def _pass(model: nn.Module, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Forward and backward of `model`; the gradients replace those of the call before."""
    x, grad = _data(dtype)

    def run() -> torch.Tensor:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        y = model(x)
        y.backward(grad)
        return y.detach()

    return run


def _check_mlp(model: nn.Module) -> str | None:
    """Output and weight gradients of the bf16 model against fp32."""
    exact = _mlp()
    y, expected = _pass(model, torch.bfloat16)(), _pass(exact, torch.float32)()
    grads = zip(model.parameters(), exact.parameters(), strict=True)
    return verify.first(
        verify.sqnr_at_least(OUTPUT_DB, "y", y, expected),
        *(
            verify.sqnr_at_least(GRADIENT_DB[i], f"grad_weight of layer {i}", p.grad, q.grad)
            for i, (p, q) in enumerate(grads)
        ),
    )


def _workload(baselines: dict[str, nn.Module]) -> Workload:
    """The MLP in bf16 with fp8 products, against other models of the same weights."""
    model = mixprec.convert(_mlp().bfloat16(), "fp8")
    return Workload(
        _pass(model, torch.bfloat16),
        {name: _pass(other, torch.bfloat16) for name, other in baselines.items()},
        lambda: _check_mlp(model),
        flops=2 * 3 * 2.0 * TOKENS * WIDTH * HIDDEN,
    )


def _against_torchao() -> Workload:
    """torchao's float8 training in its emulation mode: there is no FP8 matrix product on a CPU."""
    model = torchao_float8(_mlp().bfloat16(), emulate=True)
    return _workload({"torchao float8, emulated": model})


case(
    "mlp/fp8/torchao",
    "512 x 1024 -> 4096 -> 1024, fp8, forward + backward, against torchao's emulation",
    times_faster(3.0),
    _against_torchao,
)
case(
    "mlp/fp8/bf16",
    "the same against plain bf16",
    times_the_time(1.6),
    lambda: _workload({"torch bf16": _mlp().bfloat16()}),
)
