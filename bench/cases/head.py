"""The loss of a head with a large vocabulary, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from mixprec.functional import linear, linear_cross_entropy

from .. import device, verify
from .registry import Workload, both_passes, case, times_the_time

SIZES = {"": (1024, 768, 50257), "cuda/": (8192, 1024, 50257)}  # tokens, width, classes of GPT-2
BARS = {"loss": 80.0, "grad of x": 40.0, "grad of weight": 40.0}


def _unfused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    recipe = "bf16" if x.dtype == torch.bfloat16 else None
    return cross_entropy(linear(x, weight, recipe=recipe) if recipe else x @ weight.t(), target)


def _workload(on_gpu: bool, tokens: int, width: int, classes: int) -> Workload:
    where = device.where(on_gpu)
    if on_gpu:
        tokens, width, classes = device.sized(tokens, width, classes, tiny=64)
    x = device.randn(tokens, width, dtype=torch.bfloat16, seed=1, on=where)
    weight = device.randn(classes, width, dtype=torch.bfloat16, seed=2, on=where) / 32
    target = torch.arange(tokens, device=where) * 7919 % classes

    def both(
        loss: Callable[..., torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        return both_passes(lambda: loss(*leaves, target), leaves, torch.ones((), device=where))

    ours = partial(both, linear_cross_entropy)
    return Workload(
        ours,
        {"linear, cross_entropy": partial(both, _unfused)},
        lambda: verify.sqnr_at_least(BARS, ours(), both(_unfused, torch.double)),
        flops=3 * 2.0 * tokens * width * classes,
    )


for _where, _size in SIZES.items():
    case(
        f"{_where}head/bf16/gpt2",
        f"loss of a head, forward and backward, bf16 {list(_size[:2])}, {_size[2]} classes",
        times_the_time(1.4),
        partial(_workload, bool(_where), *_size),
        quick=bool(_where),
    )
