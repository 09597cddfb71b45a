"""Steps under wrappers of torch that the params do not show: those of one process, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_models import make_model, whole, wrapped
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mixprec
import mixprec.distributed

AdamW, BF16 = mixprec.optim.AdamW, torch.bfloat16
SIZES = 32, 64, 32


def model_and_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = make_model(*SIZES).to(dtype)
    model(torch.ones(8, 32, dtype=dtype)).float().square().mean().backward()
    return model


def zero() -> None:
    """ZeroRedundancyOptimizer clips by the norm of all, and skips together."""
    for dtype, bad in ((torch.float32, False), (BF16, True)):
        alone, model = model_and_gradients(dtype), model_and_gradients(dtype)
        options: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 1e-2}
        theirs = AdamW(alone.parameters(), **options)
        ours = ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)
        for m in (alone, model):
            m[0].weight.grad[0, 0] = torch.inf if bad else 1.0
        theirs.step()
        ours.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
        assert ours.optim.skipped == theirs.skipped == bad
    ours = ZeroRedundancyOptimizer(model.parameters(), AdamW, max_grad_value=0.5, seed=3)
    assert ours.optim.max_grad_value == 0.5


def fsdp1() -> None:
    """Refused each time, with torch's optimizer under a GradScaler too; right with the group."""
    model = FullyShardedDataParallel(
        make_model(*SIZES), use_orig_params=True, device_id=torch.device("cpu")
    )
    model(torch.ones(8, 32)).square().mean().backward()
    optimizer, scaler = AdamW(model.parameters(), max_grad_norm=1.0), mixprec.GradScaler()
    scaler.scale(torch.zeros(()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel.* pass process_group="):
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"FullyShardedDataParallel.* pass process_group="):
        scaler.step(torch.optim.SGD(model.parameters()))
    group = dist.group.WORLD
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0, process_group=group)
    alone = AdamW(model_and_gradients().parameters(), max_grad_norm=1.0)
    optimizer.step()
    alone.step()
    torch.testing.assert_close(optimizer.grad_norm, alone.grad_norm, rtol=1e-6, atol=0)


def main_grads() -> None:
    """DDP averages `grad` alone, and layers add to no main_grad of a DTensor."""
    for kind, later in (("ddp", False), ("ddp", True), ("fsdp", False)):
        model = mixprec.convert(make_model(*SIZES), "bf16")
        weight = model[0].weight
        if kind == "ddp" and not later:
            weight.main_grad = torch.zeros(weight.shape)
        outer = wrapped(kind, model)
        weight = model[0].weight
        optimizer = AdamW(outer.parameters(), lr=1e-2)
        if later:
            outer(torch.ones(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if later or kind == "fsdp":
            weight.main_grad = torch.zeros_like(weight)
        outer(torch.ones(8, 32)).square().mean().backward()
        before = whole(outer.parameters())
        with pytest.raises(RuntimeError, match=r"must have no main_grad"):
            optimizer.step()
        assert all(map(torch.equal, whole(outer.parameters()), before))
    model = mixprec.convert(make_model(*SIZES), "bf16")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    model[0].weight.main_grad = torch.zeros(SIZES[1], SIZES[0])
    DistributedDataParallel(model)(torch.ones(8, 32)).square().mean().backward()
    AdamW(model.parameters()).step()


def pipeline() -> None:
    """A stage without a loss steps and skips with the others."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    alone = make_model(32, 32, 32)
    stage = copy.deepcopy(alone)[:2] if rank == 0 else copy.deepcopy(alone)[2:]
    scaler = mixprec.GradScaler(init_scale=1024.0, process_group=group)
    ours = torch.optim.SGD(stage.parameters(), lr=1e-2)
    theirs = torch.optim.SGD(alone.parameters(), lr=1e-2)
    loss = nn.MSELoss()
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")),
        2,
        loss_fn=lambda y, target: scaler.scale(loss(y, target)),
    )
    for step in range(3):
        for part in x.chunk(2):
            (loss(alone(part), torch.zeros(4, 32)) / 2).backward()
        if rank == 0:
            schedule.step(x)
            if step == 1:
                stage[0].weight.grad[0, 0] = torch.inf
        else:
            schedule.step(target=torch.zeros(8, 32), losses=[])
        if step == 2:  # the documented order of calls with clipping
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        if step != 1:
            theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    assert (scaler.get_scale(), scaler.skipped) == (512.0, 1)
    torch.testing.assert_close(stage[0].weight, alone[2 * rank].weight)


def zero_resumed() -> None:
    """Each rank loads the masters of the params that it updates, and keeps them."""
    made = []
    for _ in range(2):
        model = make_model(*SIZES).to(BF16)
        outer = DistributedDataParallel(model)
        made.append((model, outer, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)))
    for step in range(3):
        for _, outer, optimizer in made if step == 2 else made[:1]:
            outer(torch.full((8, 32), step + 1.0, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            made[0][2].consolidate_state_dict(to=0)
            saved = [made[0][2].state_dict() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(saved, 0)
            made[1][0].load_state_dict(made[0][0].state_dict())
            made[1][2].load_state_dict(saved[0])
    masters = [[each["master"] for each in z.optim.state.values()] for _, _, z in made]
    assert masters[0]
    assert all(map(torch.equal, *masters))


def zero_scaled() -> None:
    """What reduce_gradients_in_fp32 has averaged is unscaled in main_grad, too."""
    ends = []
    for enabled in (False, True):
        model = make_model(*SIZES).to(BF16)
        ddp = DistributedDataParallel(model)
        mixprec.distributed.reduce_gradients_in_fp32(ddp)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), mixprec.optim.SGD, lr=1e-2)
        scaler = mixprec.GradScaler(init_scale=1024.0, enabled=enabled)
        scaler.scale(ddp(torch.ones(8, 32, dtype=BF16)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        ends.append(whole(model.parameters()))
    assert all(map(torch.equal, *ends))


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def delayed_pipeline(kind: type[nn.Sequential]) -> None:
    """The pass with which torch finds out shapes, on unwritten memory, leaves scales alone."""
    rank, x = dist.get_rank(), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    alone = mixprec.convert(make_model(32, 32, 32), "fp8-delayed")
    stage = kind(*(copy.deepcopy(alone)[:2] if rank == 0 else copy.deepcopy(alone)[2:]))
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=nn.MSELoss()
    )
    to_tensor = PipelineStage._to_tensor

    @torch.no_grad()
    def filled(found: torch.Tensor) -> torch.Tensor:
        return found.fill_(1e9)

    def huge(self: PipelineStage, arg: Any) -> torch.Tensor:
        found = to_tensor(self, arg)
        return found if isinstance(arg, torch.Tensor) else filled(found)

    for _ in range(2):
        target = torch.zeros(8, 32)
        with patch.object(PipelineStage, "_to_tensor", huge):
            schedule.step(x) if rank == 0 else schedule.step(target=target, losses=[])
        for part in x.chunk(2):
            nn.functional.mse_loss(alone(part), target[:4]).backward()
        for model in (alone, stage):
            mixprec.update_scales(model)
    assert torch.equal(stage[0].amax_history, alone[2 * rank].amax_history)


def on_two() -> None:
    for check in (zero, zero_resumed, zero_scaled, fsdp1, main_grads, pipeline):
        check()
    for kind in (nn.Sequential, Checkpointed):
        delayed_pipeline(kind)


def test_steps_on_two_ranks() -> None:
    on_ranks(2, on_two)


def moments_saved(folder: str, shard: bool) -> list[torch.Tensor]:
    """Of a step."""
    model, optimizer = _with_codes(shard)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    return _moments(optimizer)


def moments_loaded(folder: str, shard: bool) -> list[torch.Tensor]:
    model, optimizer = _with_codes(shard)
    ours = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(ours, checkpoint_id=folder)
    of_model, of_optimizer = ours["model"], ours["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return _moments(optimizer)


def _with_codes(shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = make_model(64, 128)
    model = wrapped("fsdp", model) if shard else model
    return model, AdamW(model.parameters(), lr=1e-2, state_dtype="int8")


def _moments(optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.fp32_state_dict()["state"].values()
    return whole(each[name] for each in state for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("shards", [(False, True), (True, False), (False, False)], ids=str)
def test_8_bit_moments_go_where_they_are_loaded(
    ranks: tuple[int, int], shards: tuple[bool, bool], tmp_path: Path
) -> None:
    saved = on_ranks(ranks[0], moments_saved, folder=str(tmp_path), shard=shards[0])[0]
    loaded = on_ranks(ranks[1], moments_loaded, folder=str(tmp_path), shard=shards[1])[0]
    for want, got in zip(saved, loaded, strict=True):  # blocks may be cut elsewhere
        assert (want - got).abs().max() <= want.abs().max() * 2.0**-4
        assert shards[0] or shards[1] or torch.equal(want, got)


def scaled_by_underflow(kind: str) -> None:
    """The scale grows by the gradients of all ranks, of which those of one underflow."""
    rank, sharded = dist.get_rank(), kind == "fsdp"
    group = None if sharded else dist.group.WORLD
    grads = [torch.full((8, 4), 1.0), torch.full((8, 4), 2.0**-22)]  # the second are subnormal
    params = [nn.Parameter(torch.zeros(8, 4, dtype=torch.float16)) for _ in range(2)]
    both = torch.cat([*grads]).half()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.cat([*params]).detach(), mesh, [Shard(0)]))
        param.grad = distribute_tensor(both, mesh, [Shard(0)])
        mine = [param]
    else:
        mine = [params[rank]]
        mine[0].grad = grads[rank].half()
    whole = nn.Parameter(torch.zeros(16, 4, dtype=torch.float16))
    whole.grad = both.clone()
    found = []
    for threshold in (0.4, 0.6):
        for its, its_group in ((mine, group), ([whole], None)):
            optimizer = mixprec.optim.SGD(its, lr=0.1, process_group=its_group)
            scaler = mixprec.GradScaler(
                init_scale=16.0,
                growth_interval=20,
                grow_on_underflow=threshold,
                process_group=its_group,
            )
            for _ in range(3):
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
            found.append(scaler.get_scale())
    assert found == [128.0, 128.0, 16.0, 16.0], (kind, found)


def refused_groups() -> None:
    """What would be counted twice, or divided in one place only."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = mixprec.optim.SGD([param], max_grad_norm=1.0, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^Ranks: process_group must be of ranks that have other"):
        optimizer.step()
    rank, x = dist.get_rank(), torch.ones(8, 4)
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), group=dist.group.WORLD)
    for p in stage.submod.parameters():
        p.main_grad = torch.zeros_like(p)
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
    schedule.step(*((x,) if rank == 0 else ()), target=x if rank else None)
    optimizer = mixprec.optim.SGD(stage.submod.parameters(), process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"^step: params of a pipeline must have no main_grad"):
        optimizer.step()
    schedule.scale_grads = False
    optimizer.step()


def masters_of_the_first() -> None:
    """Ranks begin with other numbers, and parallelize_module takes those of the first."""
    plan, found = {"0": ColwiseParallel(), "2": RowwiseParallel()}, []
    for seed in (dist.get_rank(), 0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        mixprec.cast_parameters(mixprec.convert(model, "bf16"), BF16)
        model[2].weight.requires_grad_(False)
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        values = [t.full_tensor() for t in mixprec.optim.fp32_state_dict(model).values()]
        found.append(values)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    for values in found:
        assert all(map(torch.equal, values, model.parameters()))


def all_ranks_agree() -> None:
    for kind in ("fsdp", "stages"):
        scaled_by_underflow(kind)
    refused_groups()
    masters_of_the_first()


def test_ranks_agree_on_scales_groups_and_masters() -> None:
    on_ranks(2, all_ranks_agree)
