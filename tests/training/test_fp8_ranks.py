"""FP8 layers on two ranks, under DDP and FSDP2: the bits of one process that has all the data.

That process takes the ranks' batches one after the other and averages the gradients as the ranks do
(an FP32 sum of two, halved: one rounding, whatever the order). Joined into one batch they would
give other bits: an FP32 sum in another order, a gradient WORLD times smaller.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import nearest, normal
from distributed_models import BF16, gradients_in_turn, loss_of, make_model, whole, wrapped
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec import update_scales

WORLD, STEPS, MICRO_BATCHES, BATCH = 2, 4, 3, 6
BAD_STEP, BAD_RANK = 1, 1
SIZES = (12, 5, 7, 3, 1)  # rows of 5, 7 and 3 are shared unevenly, of the last a rank has none
pytestmark = pytest.mark.filterwarnings("ignore:.*backward hooks.*")


@dataclass(frozen=True)
class Setup:
    wrap: str  # "ddp", or "fsdp", which computes in bf16
    recipe: str
    overflow: bool = False  # NaN in a batch of one rank
    reuse: bool = False  # reuse_weights around the micro-batches


def converted(recipe: str | mixprec.Recipe) -> nn.Sequential:
    """Without stochastic rounding, for which one process draws other numbers than two."""
    return mixprec.convert(make_model(*SIZES), nearest(recipe))  # type: ignore[return-value]


def batches(setup: Setup, step: int, rank: int) -> list[torch.Tensor]:
    """Of sizes that differ: the largest x is on the one rank, then on the other."""
    xs = [
        normal((BATCH, SIZES[0]), torch.float32, seed=100 * step + 10 * i + rank)
        * (1 + (step + rank) % 2 * 5)
        for i in range(MICRO_BATCHES)
    ]
    if setup.overflow and (step, rank) == (BAD_STEP, BAD_RANK):
        xs[1][0, 0] = torch.nan
    return xs


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict([*model.named_parameters(), *model.named_buffers()])
    names = [name.removeprefix("module.") for name in named]
    return dict(zip(names, whole(named.values()), strict=True))


def micro_batches(setup: Setup, model: nn.Module, step: int, rank: int, scaler: Any) -> None:
    """The backward passes of one rank's step. DDP and FSDP2 communicate in the last one only."""
    for i, x in enumerate(batches(setup, step, rank)):
        last = i == MICRO_BATCHES - 1
        alone: Any = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and not last:
            alone = model.no_sync()
        elif setup.wrap == "fsdp":
            model.set_requires_gradient_sync(last)
        with alone:
            scaler.scale(loss_of(model(x), 0.0)).backward()


def train(setup: Setup, alone: bool = False) -> list[dict[str, torch.Tensor]]:
    """Parameters, scales and histories after each step."""
    compute = BF16 if setup.wrap == "fsdp" else torch.float32
    model: nn.Module = converted(setup.recipe)
    model = model if alone else wrapped(setup.wrap, model, compute)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = mixprec.GradScaler(init_scale=2.0**4, growth_interval=100)
    left = []
    for step in range(STEPS):
        around: Any = contextlib.nullcontext()
        if setup.reuse and not alone:  # it changes no bit, and FSDP2's shards are left alone
            around = mixprec.reuse_weights(model)
        with around:
            if alone:
                ranks = ([(x, 0.0) for x in batches(setup, step, r)] for r in range(WORLD))
                grads = gradients_in_turn(model, scaler, compute, ranks)
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
            else:
                micro_batches(setup, model, step, dist.get_rank(), scaler)
        update_scales(model, None if alone else dist.group.WORLD)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        left.append(state_of(model))
    assert int(scaler.skipped) == setup.overflow
    return left


SETUPS = (
    Setup("ddp", "fp8"),
    Setup("ddp", "fp8-delayed"),
    Setup("ddp", "fp8-delayed", overflow=True),
    Setup("ddp", "fp8-delayed", overflow=True, reuse=True),
    Setup("fsdp", "fp8"),
    Setup("fsdp", "fp8-delayed", overflow=True),
    Setup("fsdp", "fp8-delayed", reuse=True),
    Setup("fsdp", "fp8-rowwise", overflow=True, reuse=True),
    Setup("ddp", "mxfp4"),
    Setup("fsdp", "nvfp4", overflow=True, reuse=True),
)


def check_one_process(setup: Setup) -> None:
    got, want = train(setup), train(setup, alone=True)
    for step, (mine, expected) in enumerate(zip(got, want, strict=True)):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(mine[name], value), f"{setup}, step {step}: {name}"
    steps = [state["0.weight"] for state in want]
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(steps)]
    assert moved == [not setup.overflow, True, True]
    if setup.recipe == "fp8-delayed":
        for name, value in want[-1].items():
            assert value.isfinite().all(), name
            if name.endswith("amax_history"):
                recorded = (value > 0).sum(1).tolist()
                assert recorded == [STEPS - setup.overflow] * 2, f"{name}: x and g"


OTHER = mixprec.Recipe("fp8-delayed", "e4m3", "e4m3", "e5m2", scaling="delayed", history=4)
# Of the two ranks, and how the error on the first says that they differ.
OTHERS: list[tuple[list[str | mixprec.Recipe], str]] = [
    (["fp8-delayed", "fp8"], r"4 here and 0 on rank 1; .*'0: fp8-delayed: x e4m3"),
    (["fp8-delayed", OTHER], r"4 here and 4 on rank 1; .*delayed\(16,max\).*delayed\(4,max\)"),
    (["fp8", "fp8-delayed"], r"0 here and 4 on rank 1; .*'0: fp8-delayed: x e4m3"),
]


def check_other_recipes(recipes: list[str | mixprec.Recipe], differs: str) -> None:
    """They are refused on both ranks, which leaves scales and histories as they were."""
    rank = dist.get_rank()
    model = converted(recipes[rank])
    loss_of(model(batches(SETUPS[0], 0, 0)[0]), 0.0).backward()
    before = state_of(model)
    differs = f"all ranks of process_group must.*{'on rank 0' if rank else differs}"
    with pytest.raises(ValueError, match=f"(?s)^update_scales: {differs}"):
        update_scales(model, dist.group.WORLD)
    after = state_of(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def check_all() -> None:
    for setup in SETUPS:
        check_one_process(setup)
    for recipes, differs in OTHERS:
        check_other_recipes(recipes, differs)


def test_ranks_are_one_process_and_refuse_other_recipes() -> None:
    on_ranks(WORLD, check_all)
