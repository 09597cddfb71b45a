"""FP8 layers on two ranks, under DDP and FSDP2: the bits of one process that has all the data.

That process takes the ranks' batches one after the other and averages the gradients as the ranks do
(an FP32 sum of two, halved: one rounding, whatever the order). Joined into one batch they would
give other bits: an FP32 sum in another order, a gradient WORLD times smaller.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import normal
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec import update_scales
from mixprec.nn import Linear

WORLD, STEPS, MICRO_BATCHES, BATCH = 2, 4, 3, 6
BAD_STEP, BAD_RANK = 1, 1
SIZES = (12, 5, 7, 3, 1)  # rows of 5, 7 and 3 are shared unevenly, of the last a rank has none
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:.*backward hooks.*")


@dataclass(frozen=True)
class Setup:
    wrap: str  # "ddp", or "fsdp", which computes in bf16
    recipe: str
    overflow: bool = False  # NaN in a batch of one rank
    reuse: bool = False  # reuse_weights around the micro-batches

    def __str__(self) -> str:
        flags = (["overflow"] * self.overflow) + (["reuse"] * self.reuse)
        return "-".join([self.wrap, self.recipe, *flags])


def make_model(recipe: str | mixprec.Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(SIZES):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return mixprec.convert(nn.Sequential(*layers[:-1]), recipe)  # type: ignore[return-value]


def batch(step: int, i: int, rank: int) -> torch.Tensor:
    """Of sizes that differ: the largest x is on the one rank, then on the other."""
    seed = 100 * step + 10 * i + rank
    return normal((BATCH, SIZES[0]), torch.float32, seed=seed) * (1 + (step + rank) % 2 * 5)


def bad(setup: Setup, step: int, i: int, rank: int) -> bool:
    return setup.overflow and (step, i, rank) == (BAD_STEP, 1, BAD_RANK)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): whole(t) for name, t in named}


def wrapped(setup: Setup, model: nn.Sequential) -> nn.Module:
    if setup.wrap == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if isinstance(layer, Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def micro_batches(setup: Setup, model: nn.Module, step: int, rank: int, scaler: Any) -> None:
    """The backward passes of one rank's step. DDP and FSDP2 communicate in the last one only."""
    for i in range(MICRO_BATCHES):
        x = batch(step, i, rank)
        if bad(setup, step, i, rank):
            x[0, 0] = torch.nan
        last = i == MICRO_BATCHES - 1
        alone: Any = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and not last:
            alone = model.no_sync()
        elif setup.wrap == "fsdp":
            model.set_requires_gradient_sync(last)
        with alone:
            scaler.scale(loss_of(model(x))).backward()


def in_turn(setup: Setup, model: nn.Module, step: int, scaler: Any) -> None:
    """What the ranks do, in one process: each rank's gradients, then their average."""
    compute = BF16 if setup.wrap == "fsdp" else torch.float32
    params = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for rank in range(WORLD):
        mine = {name: torch.zeros_like(p) for name, p in params.items()}
        for i in range(MICRO_BATCHES):
            x = batch(step, i, rank).to(compute)
            if bad(setup, step, i, rank):
                x[0, 0] = torch.nan
            cast = {name: p.to(compute) for name, p in params.items()}
            y = torch.func.functional_call(model, cast, x)
            grads = torch.autograd.grad(scaler.scale(loss_of(y)), list(params.values()))
            for name, grad in zip(params, grads, strict=True):
                mine[name] += grad
        for name, grad in mine.items():
            sums[name] += grad
    for name, p in params.items():
        p.grad = sums[name] / WORLD


def train(setup: Setup, alone: bool = False) -> list[dict[str, torch.Tensor]]:
    """Parameters, scales and histories after each step."""
    model: nn.Module = make_model(setup.recipe)
    model = model if alone else wrapped(setup, model)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = mixprec.GradScaler(init_scale=2.0**4, growth_interval=100)
    left = []
    for step in range(STEPS):
        around: Any = contextlib.nullcontext()
        if setup.reuse and not alone:  # it changes no bit, and FSDP2's shards are left alone
            around = mixprec.reuse_weights(model)
        with around:
            if alone:
                in_turn(setup, model, step, scaler)
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
)


def everything() -> dict[Any, Any]:
    """All that the tests below look at, in one group of processes."""
    results: dict[Any, Any] = {setup: train(setup) for setup in SETUPS}
    return {**results, "refused": [refused(recipes) for recipes, _ in OTHERS]}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[Any, Any]]:
    return on_ranks(WORLD, everything)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_ranks_are_one_process(by_rank: list[dict[Any, Any]], setup: Setup) -> None:
    want = train(setup, alone=True)
    for rank, got in enumerate(each[setup] for each in by_rank):
        for step, (mine, expected) in enumerate(zip(got, want, strict=True)):
            assert mine.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(mine[name], value), f"rank {rank}, step {step}: {name}"
    steps = [state["0.weight"] for state in want]
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(steps)]
    assert moved == [not setup.overflow, True, True]
    if setup.recipe == "fp8-delayed":
        for name, value in want[-1].items():
            assert value.isfinite().all(), name
            if name.endswith("amax_history"):
                recorded = (value > 0).sum(1).tolist()
                assert recorded == [STEPS - setup.overflow] * 2, f"{name}: x and g"


# --- what is refused -----------------------------------------------------------------------------


OTHER = mixprec.Recipe("fp8-delayed", "e4m3", "e4m3", "e5m2", scaling="delayed", history=4)


def refused(recipes: list[str | mixprec.Recipe]) -> tuple[str, bool]:
    """The error on this rank, and whether it left scales and histories as they were."""
    model = make_model(recipes[dist.get_rank()])
    loss_of(model(batch(0, 0, 0))).backward()
    before = state_of(model)
    message = "none"
    try:
        update_scales(model, dist.group.WORLD)
    except ValueError as error:
        message = str(error)
    after = state_of(model)
    return message, all(torch.equal(after[name], before[name]) for name in before)


OTHERS: list[tuple[list[str | mixprec.Recipe], str]] = [
    (["fp8-delayed", "fp8"], r"4 here and 0 on rank 1; .*'0: fp8-delayed: x e4m3"),
    (["fp8-delayed", OTHER], r"4 here and 4 on rank 1; .*delayed\(16,max\).*delayed\(4,max\)"),
    (["fp8", "fp8-delayed"], r"0 here and 4 on rank 1; .*'0: fp8-delayed: x e4m3"),
]


def test_other_recipes_are_refused_on_both_ranks(by_rank: list[dict[Any, Any]]) -> None:
    for (_, differs), first, second in zip(
        OTHERS, *(each["refused"] for each in by_rank), strict=True
    ):
        for message, unchanged in (first, second):
            assert unchanged
            assert message.startswith("update_scales: all ranks of process_group must")
        assert re.search(differs, first[0]), first[0]
        assert "on rank 0" in second[0]
