"""Models under DDP and FSDP2, and the gradients of one process that has the data of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

BF16, FP16 = torch.bfloat16, torch.float16


def make_model(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def wrapped(kind: str, model: nn.Sequential, compute: torch.dtype | None = None) -> nn.Module:
    """kind: "ddp", "fsdp", or "hsdp", two replicas of shards; compute: FSDP casts params to it."""
    if kind == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    world = dist.get_world_size()
    shape = (2, world // 2) if kind == "hsdp" else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model:
        if hasattr(layer, "weight"):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach().clone() for t in full]


def loss_of(out: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    return (out.float() - y).square().mean()


def gradients_in_turn(
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    compute: torch.dtype,
    ranks: Iterable[Iterable[tuple[torch.Tensor, torch.Tensor | float]]],
) -> list[torch.Tensor]:
    """Each rank's gradients, added up over its batches, then the average of the ranks, in FP32."""
    params = dict(model.named_parameters())
    by_rank = []
    for batches in ranks:
        mine = [torch.zeros(p.shape) for p in params.values()]
        for x, y in batches:
            cast = {name: p.to(compute) for name, p in params.items()}
            out = torch.func.functional_call(model, cast, x.to(compute))
            grads = torch.autograd.grad(scaler.scale(loss_of(out, y)), list(params.values()))
            for total, grad in zip(mine, grads, strict=True):
                total += grad.float()
        by_rank.append(mine)
    return [sum(grads) / len(by_rank) for grads in zip(*by_rank, strict=True)]
