"""The loss of a head with a large vocabulary, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import mixprec
from mixprec.functional import linear, linear_cross_entropy

from .. import device, verify
from .registry import Workload, both_passes, case, times_the_time

TOKENS, WIDTH, CLASSES = 1024, 768, 50257  # GPT-2's
BLOCK = 256  # tokens
TARGET = 1.4
BARS = {"loss": 80.0, "grad of x": 40.0, "grad of weight": 40.0}

Tensors = tuple[torch.Tensor, ...]


class Head(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor


def make_head(dtype: torch.dtype = torch.bfloat16) -> Head:
    x = device.randn(TOKENS, WIDTH, dtype=torch.bfloat16, seed=1, on="cpu")
    weight = device.randn(CLASSES, WIDTH, dtype=torch.bfloat16, seed=2, on="cpu") / 32
    target = torch.arange(TOKENS) * 7919 % CLASSES
    return Head(x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target)


def _pass(head: Head, loss: Callable[[], torch.Tensor]) -> Tensors:
    return both_passes(loss, [head.x, head.weight], torch.ones(()))


def ours(head: Head) -> Tensors:
    return _pass(head, lambda: linear_cross_entropy(*head))


def unfused(head: Head) -> Tensors:
    x, weight, target = head
    return _pass(head, lambda: cross_entropy(linear(x, weight, recipe="bf16"), target))


@torch.no_grad()
def in_blocks(head: Head) -> Tensors:
    """The gradients of a block of tokens with their logits, as Liger's kernels have it; that of the
    weight is summed in FP32."""
    x, weight, target = head
    loss, grads = torch.zeros(()), []
    total = torch.zeros(weight.shape)
    for i in range(0, len(x), BLOCK):
        some, own = x[i : i + BLOCK], target[i : i + BLOCK, None]
        logits = mixprec.gemm(some, weight.t(), out_dtype=torch.float32)
        logsumexp = logits.logsumexp(1, keepdim=True)
        loss += (logsumexp - logits.gather(1, own)).sum() / len(x)
        g = logits.sub_(logsumexp).exp_()
        g.scatter_add_(1, own, -torch.ones(own.shape))
        low = (g / len(x)).to(x.dtype)
        grads.append(mixprec.gemm(low, weight))
        mixprec.gemm_accumulate_(total, low.t(), some)
    return loss, torch.cat(grads), total.to(weight.dtype)


WAYS: dict[str, Callable[[Head], Tensors]] = {
    "linear, cross_entropy": unfused,
    "blocks of 256 tokens": in_blocks,
    "linear_cross_entropy": ours,
}


def _workload() -> Workload:
    head = make_head()

    def check() -> str | None:
        x, weight, target = wide = make_head(torch.float64)
        want = _pass(wide, lambda: cross_entropy(x @ weight.t(), target))
        return verify.sqnr_at_least(BARS, ours(head), want)

    return Workload(
        lambda: ours(head),
        {name: lambda way=way: way(head) for name, way in WAYS.items() if way is not ours},  # type: ignore[misc]
        check,
        flops=3 * 2.0 * TOKENS * WIDTH * CLASSES,
    )


case(
    "head/bf16/gpt2",
    f"loss of a head, forward and backward, bf16 [{TOKENS}, {WIDTH}], {CLASSES} classes",
    times_the_time(TARGET),
    _workload,
    quick=False,
)
