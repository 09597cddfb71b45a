"""Matrices of which each rank has a part: each is computed on as a whole, by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._local_gradients import is_sharded

Compute = Callable[[torch.Tensor], torch.Tensor]


class Split(NamedTuple):
    """How the ranks of a group share a matrix: in chunks of dimension `dim`, as torch.chunk."""

    group: Any
    dim: int


class Work(NamedTuple):
    """The matrices that are computed at a time, by index: that of each rank of the split's group,
    None where it has nothing to do. Without a split, one matrix on each rank."""

    split: Split | None
    matrices: list[int | None]


def split_of(param: Any) -> Split | None:
    """None for a matrix that is whole, or that is split in more than one dimension of a mesh."""
    if not is_sharded(param):
        return None
    from torch.distributed.tensor import Shard

    split = [(i, place) for i, place in enumerate(param.placements) if not place.is_replicate()]
    if len(split) != 1 or type(split[0][1]) is not Shard:
        return None
    (i, place), mesh = split[0], param.device_mesh
    return Split(mesh.get_group(i), place.dim % 2) if mesh.size(i) > 1 else None


def plan(params: Sequence[torch.Tensor]) -> Iterator[Work]:
    """All matrices of `params`, [M, N]: the largest first, each for the rank that has the least
    work so far, the same on every rank."""
    alike: dict[Any, tuple[Split, list[int]]] = {}
    for i, p in enumerate(params):
        if (split := split_of(p)) is None:
            yield Work(None, [i])
        else:
            # Not by the group, of which each mesh may have an object of its own.
            key = p.device_mesh, p.placements, p.dtype  # type: ignore[attr-defined]
            alike.setdefault(key, (split, []))[1].append(i)
    for split, indices in alike.values():
        cost = {i: params[i].numel() * min(params[i].shape) for i in indices}
        indices.sort(key=lambda i: -cost[i])
        load = [0] * split.group.size()
        for start in range(0, len(indices), len(load)):
            ranks = sorted(range(len(load)), key=load.__getitem__)
            matrices: list[int | None] = [None] * len(load)
            for rank, i in zip(ranks, indices[start : start + len(load)], strict=False):
                matrices[rank] = i
                load[rank] += cost[i]
            yield Work(split, matrices)


def compute_on_owners(
    split: Split,
    shapes: Sequence[torch.Size | None],
    parts: Sequence[torch.Tensor],
    compute: Compute,
) -> list[torch.Tensor]:
    """This rank's parts of compute(matrix) for each of the matrices, one of each rank of the group.

    shapes: of the whole matrices, by rank, None where it has none; parts: this rank's parts of
    those that there are, all of one dtype, as the results are. It takes two all-to-alls.
    """
    group, dim = split
    rank, world = group.rank(), group.size()

    def sizes(shape: torch.Size) -> list[int]:
        """Along dim, of the part of each rank."""
        chunk = -(-shape[dim] // world)
        return [min(chunk, max(0, shape[dim] - r * chunk)) for r in range(world)]

    rest = iter(parts)
    given = [None if shape is None else next(rest) for shape in shapes]
    mine, numels = shapes[rank], [0 if part is None else part.numel() for part in given]
    ends = [0] * world if mine is None else sizes(mine)
    across = 0 if mine is None else mine[1 - dim]
    counts = [end * across for end in ends]
    flat = torch.cat([part.reshape(-1) for part in parts])
    received = _all_to_all(flat, counts, numels, group)
    if mine is not None:
        shapes_of_parts = [(end, across) if dim == 0 else (across, end) for end in ends]
        blocks = zip(received.split(counts), shapes_of_parts, strict=True)
        result = compute(torch.cat([block.view(shape) for block, shape in blocks], dim))
        received = torch.cat([block.reshape(-1) for block in result.split(ends, dim)])
    returned = _all_to_all(received, numels, counts, group).split(numels)
    pairs = zip(given, returned, strict=True)
    return [values.view(part.shape) for part, values in pairs if part is not None]


def _all_to_all(
    x: torch.Tensor, to_receive: list[int], to_send: list[int], group: Any
) -> torch.Tensor:
    import torch.distributed as dist

    received = x.new_empty(sum(to_receive))
    dist.all_to_all_single(received, x, to_receive, to_send, group)
    return received
