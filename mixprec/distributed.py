"""Agreement between ranks before an optimizer step, and gradients averaged in FP32."""

from __future__ import annotations

import gc
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _masters
from ._local_gradients import (
    LOW_PRECISION,
    any_sharded,
    is_copy,
    is_fully_sharded,
    is_sharded,
    watch,
)
from .ops._dispatch import checks
from .ops._dispatch.checks import is_dense

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel


@dataclass
class _Plan:
    """Which squared norms go into which sum, and the arguments this was computed from."""

    params: list[torch.Tensor]
    scopes: list[int]
    shape: tuple[int, torch.device, list[DeviceMesh]]
    member: torch.Tensor  # bool [(1 + meshes) * count, n], plain tensors before all meshes
    weight: torch.Tensor  # fp64 [n]


class Ranks:
    """The ranks that must skip, and clip, a step together.

    Ranks that share DTensors (FSDP2, tensor parallelism) are found from the tensors' meshes.
    process_group adds ranks that hold different params, such as the stages of a pipeline: their
    squared norms are added up, so no two of its ranks may hold the same part of a param. With DDP
    every rank has the same gradients, and no communication is needed. Raises TypeError if
    process_group is not a ProcessGroup that this rank is in.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is not None:
            checks.is_group("Ranks", process_group)
        self.process_group = process_group
        self._plan: _Plan | None = None

    def is_local(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether no other rank takes part: no process_group, no DTensor on two or more ranks.
        RuntimeError for params of FSDP1 without a process_group."""
        if self.process_group is not None:
            return False
        _refuse_fsdp1(params)
        return not any_sharded(params) or not _meshes(params)

    @torch.no_grad()
    def agree_(
        self,
        found_inf: torch.Tensor,
        sum_sq: torch.Tensor,
        params: Sequence[torch.Tensor],
        scopes: Sequence[int],
        count: int,
        all_params: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Set `found_inf` (fp32, one element) to 1.0 on every rank if it is not 0 on any of them
        (Inf and NaN included), else to 0.0; return fp64 [count], the squared norm of each scope
        over all ranks.

        sum_sq: fp64 [n] on found_inf's device, the squared norms of this rank's parts of the
        gradients of the n `params`; the i-th belongs to scope scopes[i]. all_params, all params of
        the optimizer, determine which ranks take part: their number, order and
        meshes must be the same on every rank, even where a gradient is missing.

        It takes one all-reduce of 1 + count FP64 numbers per mesh, the smallest mesh first, and one
        over process_group. Every rank of a mesh gets the same bits. Copies of a DTensor that is
        replicated along a dimension of its mesh count once in total. There is no host sync. Raises
        RuntimeError if another rank does not answer.
        """
        meshes = _meshes(all_params)
        plan = self._plan_for(params, scopes, (count, found_inf.device, meshes))
        # torch.where, not a product with 0: an Inf sum must not turn the other scopes into NaN.
        sums = torch.where(plan.member, sum_sq * plan.weight, 0).sum(1)
        parts = sums.view(1 + len(meshes), count)
        found = (found_inf.reshape(1) != 0).double()
        total = parts[0]
        for mesh, part in zip(meshes, parts[1:], strict=True):
            found, over_mesh = _sum(found, part, _groups(mesh))
            total = total + over_mesh
        if self.process_group is not None:
            found, total = _sum(found, total, [self.process_group])
        found_inf.copy_(found.reshape(found_inf.shape))
        return total

    def _check_group(self, meshes: list[DeviceMesh]) -> None:
        """ValueError where process_group would count parts of DTensors a second time."""
        if self.process_group is None or not meshes:
            return
        import torch.distributed as dist

        mine = set(dist.get_process_group_ranks(self.process_group))
        for mesh in meshes:
            if len(mine.intersection(mesh.mesh.flatten().tolist())) > 1:
                raise ValueError(
                    "Ranks: process_group must be of ranks that have other params, such as the "
                    f"stages of a pipeline, got ranks {sorted(mine)}, of which several share the "
                    f"DTensors of {mesh}: leave it out, these are found"
                )

    def _plan_for(
        self,
        params: Sequence[torch.Tensor],
        scopes: Sequence[int],
        shape: tuple[int, torch.device, list[DeviceMesh]],
    ) -> _Plan:
        """The plan of the last step if the arguments are the same: creating its tensors again from
        lists would wait for the device."""
        plan = self._plan
        known = [] if plan is None else plan.params
        same = len(params) == len(known) and all(map(operator.is_, params, known))
        if plan is not None and same and (plan.scopes, plan.shape) == (list(scopes), shape):
            return plan
        count, device, meshes = shape
        self._check_group(meshes)
        place = {mesh: 1 + i for i, mesh in enumerate(meshes)}
        places, weights = [], []
        for p, scope in zip(params, scopes, strict=True):
            mesh: Any = getattr(p, "device_mesh", None)
            stage = place.get(mesh, 0)
            places.append(stage * count + scope)
            weights.append(1 / _copies(p) if stage else 1.0)
        which = torch.arange((1 + len(meshes)) * count, device=device)[:, None]
        member = which == torch.tensor(places, dtype=torch.int64, device=device)
        weight = torch.tensor(weights, dtype=torch.float64, device=device)
        self._plan = _Plan(list(params), list(scopes), shape, member, weight)
        return self._plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.process_group)

    def __reduce__(self) -> tuple[type[Ranks], tuple[()]]:
        if self.process_group is not None:
            raise TypeError("Ranks: a process_group cannot be pickled; save a state_dict instead")
        return Ranks, ()


def _meshes(params: Sequence[torch.Tensor]) -> list[DeviceMesh]:
    """The meshes of more than one rank that include this one, in the same order on all ranks.

    Larger meshes come later, so that they receive the flag of smaller ones within them.
    """
    meshes = {id(p.device_mesh): p.device_mesh for p in params if is_sharded(p)}  # type: ignore[attr-defined]
    mine = (m for m in meshes.values() if m.size() > 1 and m.get_coordinate() is not None)
    return sorted(dict.fromkeys(mine), key=lambda mesh: mesh.size())  # by value: slices are equal


def _copies(param: torch.Tensor) -> int:
    """The number of ranks that hold each element of a DTensor."""
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(d) for d, place in enumerate(placements) if place.is_replicate())


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups over which a sum becomes the sum over the mesh."""
    import torch.distributed as dist

    if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        # One all-reduce instead of one per dimension; and where two groups of the last dimension
        # add in different orders, as NCCL's may, their last bits would differ.
        return [dist.group.WORLD]  # type: ignore[list-item]
    return mesh.get_all_groups()


def _sum(
    found: torch.Tensor, sums: torch.Tensor, groups: list[dist.ProcessGroup]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce the flag (fp64 [1], 0.0 or 1.0) and the sums over each group in turn."""
    vector = torch.cat([found, sums])
    for group in groups:
        vector = _all_reduce(vector, group)
    return (vector[:1] != 0).double(), vector[1:]


def _all_reduce(vector: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the group, on vector's device; vector may be overwritten."""
    import torch.distributed as dist

    if dist.get_world_size(group) == 1:
        return vector
    # Gradients may be on the CPU while the group reduces on GPUs only.
    kinds = [kind.split(":")[0] for kind in dist.get_backend_config(group).split(",")]
    there = vector if vector.device.type in kinds else vector.to(kinds[0])
    try:
        dist.all_reduce(there, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"Ranks: rank {dist.get_rank()} could not agree with the other ranks on whether to "
            "skip this step; most likely one of them has ended: its own log says why"
        ) from error
    return there.to(vector.device)


def reduce_gradients_in_fp32(ddp_model: DistributedDataParallel) -> None:
    """Let DDP average gradients in FP32, whatever the dtype of the params.

    Registers a communication hook: each bucket is converted to FP32, summed over the ranks and
    divided by their number. The average of a 16-bit param is kept in `param.main_grad` (fp32),
    which mixprec's optimizers use; `param.grad` is this average rounded. main_grad holds all
    gradients accumulated, also under no_sync(). It is not used where `grad` is None, and dropped by
    the next backward pass, step() and zero_grad(). For fp32 and fp64 params the only change is that
    the sum is divided instead of each term. Communication doubles for 16-bit buckets. (An
    optimizer's grad_dtype=torch.float32 is a different option, which DDP does not support.)

    Raises TypeError unless given a DistributedDataParallel, and ValueError with
    find_unused_parameters=True: DDP does not write the gradients of params that no rank used.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            "reduce_gradients_in_fp32: ddp_model must be a DistributedDataParallel, got "
            f"{type(ddp_model).__name__}"
        )
    if ddp_model.find_unused_parameters:
        raise ValueError(
            "reduce_gradients_in_fp32: ddp_model must have find_unused_parameters=False, got True"
        )
    # DDP rejects hooks whose annotations are strings, as they all are in this module.
    ddp_model.register_comm_hook(
        ddp_model.process_group, lambda group, bucket: _average_in_fp32(group, bucket)
    )


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _zero() -> Any:
    """ZeroRedundancyOptimizer, if it is imported."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return getattr(module, "ZeroRedundancyOptimizer", None)


def inside_zero(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of this rank inside a ZeroRedundancyOptimizer; any other itself."""
    zero = _zero()
    return optimizer.optim if zero is not None and isinstance(optimizer, zero) else optimizer


def _refuse_fsdp1(params: Sequence[torch.Tensor]) -> None:
    """RuntimeError for the parts that FullyShardedDataParallel leaves on a rank, which are plain
    tensors: whose they are is not known."""
    is_loaded = "torch.distributed.fsdp" in sys.modules and _world_size() > 1
    if is_loaded and any(vars(p).get("_fsdp_flattened", False) for p in params):
        raise RuntimeError(
            "step: params must be whole, or DTensors, got those of FullyShardedDataParallel, of "
            "which each rank has a part: pass process_group=, the group that they are sharded "
            "over, to mixprec's optimizer and GradScaler, or use "
            "torch.distributed.fsdp.fully_shard"
        )


def check_grad_dtype(who: str, params: Sequence[torch.Tensor]) -> None:
    """ValueError where a wrapper of torch averages the gradients of 16-bit params in 16 bits."""
    import torch.distributed as dist

    mine = {id(p) for p in params if p.dtype in LOW_PRECISION}
    if not mine or not dist.is_available() or not dist.is_initialized():
        return
    from torch.nn.parallel import DistributedDataParallel

    for wrapper in gc.get_objects():
        kind = type(wrapper)
        if not issubclass(kind, torch.nn.Module):
            continue
        is_ddp = issubclass(kind, DistributedDataParallel)
        if not is_ddp and not is_fully_sharded(wrapper):
            continue
        if not mine.isdisjoint(map(id, wrapper.parameters())):
            name = "DistributedDataParallel" if is_ddp else "fully_shard"
            instead = (
                "mixprec.distributed.reduce_gradients_in_fp32(ddp_model)"
                if is_ddp
                else "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
            raise ValueError(
                f"{who}: grad_dtype must be None for 16-bit params of {name}, which gives them "
                f"gradients of their dtype, got torch.float32: use {instead}"
            )


@torch.no_grad()
def first_step(
    optimizer: torch.optim.Optimizer, ranks: Ranks, params: Sequence[torch.Tensor]
) -> None:
    """What wrappers of torch that know the params mean for a step, which all ranks take together:

    DistributedDataParallel makes the params of its ranks equal, but not what 16-bit ones were
    rounded from: they get the masters of the first rank. It does not average `main_grad`:
    RuntimeError for params that have one, and for those of a pipeline, whose schedule divides
    `grad` alone by the number of micro-batches. ZeroRedundancyOptimizer gives each rank an
    optimizer of some of the params, with their masters: its group is that of `ranks`.

    params: those of the optimizer.
    """
    if _world_size() == 1:
        return
    if ranks.process_group is None:
        _refuse_fsdp1(params)
    from torch.nn.parallel import DistributedDataParallel

    zero, pipelines = _zero(), sys.modules.get("torch.distributed.pipelining.schedules")
    schedule = getattr(pipelines, "_PipelineSchedule", None)
    mine = set(map(id, params))
    # Neither module nor optimizer knows what wraps it: of all objects, those of these classes.
    kinds = tuple(k for k in (DistributedDataParallel, schedule, zero) if k is not None)
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    around = [w for w in wrappers if zero and isinstance(w, zero) and w.optim is optimizer]
    for wrapper in wrappers:
        if isinstance(wrapper, DistributedDataParallel):
            _same_masters(wrapper, mine, is_split=bool(around))
        elif schedule and isinstance(wrapper, schedule):
            _refuse_undivided(wrapper, mine)
    for wrapper in around:
        ranks.process_group = ranks.process_group or wrapper.process_group


def _refuse_undivided(schedule: Any, mine: set[int]) -> None:
    """RuntimeError for a schedule that divides gradients of params with a main_grad."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    params = (p for stage in stages for p in stage.submod.parameters() if id(p) in mine)
    if not schedule.scale_grads or schedule._n_microbatches == 1:
        return
    if any(vars(p).get("main_grad") is not None for p in params):
        raise RuntimeError(
            "step: params of a pipeline must have no main_grad, which its schedule does not divide "
            "by the number of micro-batches as it does grad: give the schedule scale_grads=False "
            "and a loss that is divided by it"
        )


def _same_masters(wrapper: DistributedDataParallel, mine: set[int], is_split: bool) -> None:
    """Of its params, if any is in `mine`, which holds ids. is_split: each rank has the masters of
    those that it updates."""
    import torch.distributed as dist

    named, group = wrapper.module.named_parameters(), wrapper.process_group
    inside = [p for name, p in named if name not in wrapper.parameters_to_ignore]
    if dist.get_world_size(group) == 1 or mine.isdisjoint(map(id, inside)):
        return
    mains = [vars(p).get("main_grad") for p in inside]
    if any(main is not None and not is_copy(main) for main in mains):
        raise RuntimeError(
            "step: params of a DistributedDataParallel must have no main_grad, which it does not "
            "average over its ranks: use mixprec.distributed.reduce_gradients_in_fp32, which sums "
            "in FP32 too, or name them in its parameters to ignore and average main_grad yourself"
        )
    if is_split:
        return
    _masters.attach()
    low = [p for p in inside if p.dtype in LOW_PRECISION and not is_sharded(p)]
    has = torch.tensor([_masters.has_values(p) for p in low], dtype=torch.int32)
    counts = _all_reduce(has, group).tolist()
    for p in (p for p, count in zip(low, counts, strict=True) if count):
        values = _masters.values_of(p).contiguous()
        before = values.clone()
        dist.broadcast(values, dist.get_global_rank(group, 0), group)
        # Remainders of equal values stay as they are: setting them moves those of ties by a unit.
        if _all_reduce(torch.tensor([not torch.equal(values, before)], dtype=torch.int32), group):
            _masters.set_values(p, values)


def _drop_copy(param: torch.Tensor) -> None:
    """A hook: `grad` has changed, and if DDP communicates, it makes a new copy."""
    if is_copy(vars(param).get("main_grad")):
        param.main_grad = None  # type: ignore[attr-defined]


def _average_in_fp32(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    import torch.distributed as dist

    buffer = bucket.buffer()
    wide = buffer
    if buffer.dtype in LOW_PRECISION:
        wide = buffer.float()
        start = buffer.storage_offset()
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # `grad` is contiguous, but DDP gives the gradient its param's strides, if dense.
            strides = param.stride() if is_dense(param) else grad.stride()
            offset = grad.storage_offset() - start
            # Filled at the end of the backward pass, when DDP has waited for the future below.
            main: Any = wide.as_strided(grad.size(), strides, offset)
            main.is_copy_of_grad = True
            param.main_grad = main  # type: ignore[attr-defined]
            watch(param, _drop_copy)
    ranks = dist.get_world_size(group)

    def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        nonlocal wide
        future.value()  # raises the error of the all-reduce, if any
        wide /= ranks
        return buffer if wide is buffer else buffer.copy_(wide)

    work = dist.all_reduce(wide, group=group, async_op=True)
    return work.get_future().then(finish)
