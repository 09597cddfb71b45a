"""The loss of a head with a large vocabulary, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from mixprec.functional import linear, linear_cross_entropy

from .. import device, verify
from .registry import Workload, both_passes, case, times_the_time

TOKENS, WIDTH, CLASSES = 1024, 768, 50257  # GPT-2's
BARS = {"loss": 80.0, "grad of x": 40.0, "grad of weight": 40.0}


def _unfused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    recipe = "bf16" if x.dtype == torch.bfloat16 else None
    return cross_entropy(linear(x, weight, recipe=recipe) if recipe else x @ weight.t(), target)


def _workload() -> Workload:
    x = device.randn(TOKENS, WIDTH, dtype=torch.bfloat16, seed=1, on="cpu")
    weight = device.randn(CLASSES, WIDTH, dtype=torch.bfloat16, seed=2, on="cpu") / 32
    target = torch.arange(TOKENS) * 7919 % CLASSES

    def both(
        loss: Callable[..., torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        return both_passes(lambda: loss(*leaves, target), leaves, torch.ones(()))

    ours = partial(both, linear_cross_entropy)
    return Workload(
        ours,
        {"linear, cross_entropy": partial(both, _unfused)},
        lambda: verify.sqnr_at_least(BARS, ours(), both(_unfused, torch.double)),
        flops=3 * 2.0 * TOKENS * WIDTH * CLASSES,
    )


case(
    "head/bf16/gpt2",
    f"loss of a head, forward and backward, bf16 [{TOKENS}, {WIDTH}], {CLASSES} classes",
    times_the_time(1.4),
    _workload,
)
