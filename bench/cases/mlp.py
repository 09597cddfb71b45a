"""Whole layers, forward and backward: what a training run feels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import mixprec

from .. import device, verify
from .registry import Workload, both_passes, case, times_faster, times_the_time, torchao_float8

TOKENS, WIDTH, HIDDEN = 512, 1024, 4096
# The accuracy that an fp8 layer must keep; the gradient of the first layer has been through the
# casts of both, twice the noise: 3 dB.
BARS = {
    "y": 18.0,
    "grad of x": 14.0,
    "grad_weight of layer 0": 14.0,
    "grad_weight of layer 1": 17.0,
}


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def _pass(model: nn.Module, dtype: torch.dtype) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward; x needs a gradient, as inside a network."""
    x, g = (device.randn(TOKENS, WIDTH, dtype=dtype, seed=seed, on="cpu") for seed in (1, 2))
    leaves = [x.requires_grad_(), *model.parameters()]
    return lambda: both_passes(lambda: model(x), leaves, g)


def _workload(baselines: dict[str, nn.Module]) -> Workload:
    """The MLP in bf16 with fp8 products, against other models of the same weights."""
    ours = _pass(mixprec.convert(_mlp().bfloat16(), "fp8"), torch.bfloat16)
    return Workload(
        ours,
        {name: _pass(other, torch.bfloat16) for name, other in baselines.items()},
        lambda: verify.sqnr_at_least(BARS, ours(), _pass(_mlp(), torch.float32)()),
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
