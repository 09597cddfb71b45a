"""reduce_gradients_in_fp32: gradients of 16-bit params averaged in FP32, on two and four ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_models import BF16, FP16
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec.distributed import reduce_gradients_in_fp32


class Given(nn.Module):
    """Params of many shapes and memory orders, whose gradients are what forward is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        values = [torch.zeros(5, 3), torch.zeros(7), images, torch.zeros(6, 4).t(), torch.zeros(())]
        low = [nn.Parameter(value.to(dtype)) for value in values]
        low.append(nn.Parameter(torch.zeros(4, 6, dtype=dtype)[:, ::2]))  # gaps: DDP closes them
        self.params = nn.ParameterList([*low, nn.Parameter(torch.zeros(9))])

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        parts = zip(self.params, grads, strict=True)
        return sum((p * g).float().sum() for p, g in parts)


STRIDES = [(3, 1), (1,), (48, 1, 12, 3), (1, 4), (), (3, 1)]  # of the gradients of low params


def grads_given(dtype: torch.dtype, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Small numbers on all ranks but the first: lost in 16 bits, exact in FP32 in any order."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    grads = []
    for i, p in enumerate(Given(dtype).params):
        whole = torch.randint(1, 4, p.shape, generator=generator).float()
        if rank == 0:
            whole += 2048 + torch.randint(0, 64, p.shape, generator=generator) * 16
        if i == 0:  # one param that overflows, on one rank
            whole[0, 0] = math.inf if rank == 1 else 1.0
        grads.append(whole.to(p.dtype))
    return grads


def average(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(t.float() for t in ts) / len(ts) for ts in zip(*parts, strict=True)]


def check_gradients(params: Any, exact: list[torch.Tensor]) -> None:
    """main_grad is the FP32 average, grad the same rounded; an fp32 param has its grad only."""
    *low, wide = params
    assert not hasattr(wide, "main_grad")
    for p, want, strides in zip(low, exact, STRIDES, strict=False):
        assert p.main_grad.dtype == torch.float32
        assert p.main_grad.stride() == p.grad.stride() == strides
        assert torch.equal(p.main_grad, want)
    for p, want in zip(params, exact, strict=True):
        assert torch.equal(p.grad, want.to(p.dtype))


def check_hook(dtype: torch.dtype, as_views: bool) -> None:
    """After one backward, and after three of which the last one communicates."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    hooked, plain = (
        DistributedDataParallel(
            Given(dtype),
            bucket_cap_mb=0.0001,  # some buckets, each of several params
            gradient_as_bucket_view=as_views,
        )
        for _ in range(2)
    )
    reduce_gradients_in_fp32(hooked)
    exact = average([grads_given(dtype, r) for r in ranks])
    for model in (hooked, plain):
        model(grads_given(dtype, rank)).backward()
    check_gradients(hooked.module.params, exact)
    *low, wide = (p.grad.float() - want for p, want in zip(plain.module.params, exact, strict=True))
    assert not wide.any()
    lost = max(each.nan_to_num(0).abs().max() for each in low)
    assert lost > 0.4, "averaging in 16 bits should have lost the small numbers"
    params = hooked.module.params
    for p in params:
        p.grad = None  # and main_grad is replaced
    with hooked.no_sync():
        for step in (1, 2):
            hooked(grads_given(dtype, rank, step)).backward()
    hooked(grads_given(dtype, rank, 3)).backward()
    # What each rank had accumulated, in 16 bits, when the last backward began to add to it.
    given = [[grads_given(dtype, r, step) for step in (1, 2, 3)] for r in ranks]
    check_gradients(
        params, average([[a + b + c for a, b, c in zip(*steps, strict=True)] for steps in given])
    )


def check_copies(layer: nn.Module) -> None:
    """main_grad holds for the `grad` that it was made with alone, and no layer adds to it."""
    ddp = DistributedDataParallel(layer)
    reduce_gradients_in_fp32(ddp)
    x, optimizer = torch.ones(2, 4, dtype=BF16), mixprec.optim.SGD(ddp.parameters(), lr=1.0)
    for clear in (lambda: optimizer.zero_grad(set_to_none=False), ddp.zero_grad):
        for model, change in ((nn.Identity(), 0), (ddp.module, 2), (ddp, 2)):
            before = layer.weight.float()
            ddp(64 * x).float().sum().backward()
            clear()
            model(x.requires_grad_()).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (before - layer.weight - change).abs().max() < 0.1
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(x).float().sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="GradScaler does not see main_grad"):
        scaler.step(optimizer)


def check_hooks() -> None:
    check_copies(nn.Linear(4, 4, dtype=BF16))
    check_copies(mixprec.convert(nn.Linear(4, 4, dtype=BF16), "bf16"))
    for dtype, as_views in ((BF16, True), (FP16, False), (BF16, False)):
        check_hook(dtype, as_views)
    model: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^reduce_gradients_in_fp32: ddp_model must be"):
        reduce_gradients_in_fp32(model)
    unused = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"^reduce_gradients_in_fp32: ddp_model must have"):
        reduce_gradients_in_fp32(unused)


@pytest.mark.parametrize("world", [2, 4])
def test_the_hook_averages_in_fp32(world: int) -> None:
    on_ranks(world, check_hooks)
