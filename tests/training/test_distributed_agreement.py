"""Ranks: flags and squared norms that ranks agree on, with DTensors and process groups."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mixprec.distributed import Ranks

FLAGS = (0.0, 1.0, 2.0, -1.0, math.inf, math.nan)
# Five rows over four ranks are 2, 2, 1 and 0; one row leaves three ranks without any.
SHAPES = ((5, 3), (1,), (7, 2), (4, 4), (0, 3))
SCOPES = [0, 2, 0, 2, 0]


def square_norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().square().sum()


def agree(
    ranks: Ranks,
    params: list[Any],
    want: list[float],
    *,
    scopes: list[int] = SCOPES,
    flag: float = 0.0,
    found: bool = False,
    missing: Any = (),
    shape: tuple[int, ...] = (),
    sizes: list[int] | None = None,
) -> list[float]:
    """One agreement, the params being their own gradients, has found or not found an overflow and
    has the totals `want`, which are returned. sizes: how many numbers each reduction was of."""
    flags = torch.full(shape, flag)
    here = [i for i in range(len(params)) if i not in missing]
    mine = [params[i] for i in here]
    sums = [square_norm(p.to_local() if isinstance(p, DTensor) else p) for p in mine]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        totals = ranks.agree_(
            flags,
            torch.stack(sums) if here else torch.zeros(0).double(),
            mine,
            [scopes[i] for i in here],
            3,
            params,
        )
    assert (flags.shape, flags.item()) == (shape, float(found))
    assert totals.dtype == torch.float64
    assert totals.tolist() == pytest.approx(want, rel=1e-14)
    if sizes is not None:
        assert [call.args[0].numel() for call in calls.call_args_list] == sizes
    return totals.tolist()


def check_agreements() -> list[list[float]]:
    """On four ranks: the totals that all of them must have, bit for bit."""
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "copy", "part"))
    pair = cube["copy", "part"]  # ranks 0 and 1, ranks 2 and 3: two dimensions, not all ranks
    across = cube["stage"].get_group()  # ranks 0 and 2, ranks 1 and 3
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
    norms = [square_norm(t).item() for t in whole]

    def shards(mesh: DeviceMesh, *placements: Any) -> list[Any]:
        return [distribute_tensor(t, mesh, placements) for t in whole]

    def part(i: int, of: int) -> float:
        """The squared norm of the rows of whole[i] that rank `of` has."""
        return square_norm(whole[i].chunk(4)[of]).item()

    ranks, sharded, group = Ranks(), shards(line, Shard(0)), Ranks(dist.group.WORLD)
    by_scope = [norms[0] + norms[2] + norms[4], 0.0, norms[1] + norms[3]]
    without_part = [by_scope[0] - part(2, 1), 0.0, by_scope[2]]
    without_rank = [by_scope[0] - part(2, 3), 0.0, by_scope[2] - part(3, 3)]
    two_shards = [distribute_tensor(t, grid, (Shard(1), Shard(0))) for t in whole[2:4]]
    two_meshes = [*sharded[:2], *shards(grid["shard"], Shard(0))[2:]]
    # Two pipeline stages, whose gradients differ by a factor of 2, of two replicas each.
    stages = [(1 + rank // 2) * t for t in shards(pair, Replicate(), Replicate())]
    same = [
        agree(ranks, sharded, by_scope, sizes=[4]),
        agree(ranks, sharded, by_scope),
        agree(ranks, sharded, [0, sum(norms), 0], scopes=[1] * 5),
        agree(ranks, shards(line, Replicate()), by_scope),
        agree(ranks, shards(grid, Replicate(), Shard(0)), by_scope, sizes=[4]),  # of all ranks
        agree(ranks, two_shards, [norms[2], 0, norms[3]], scopes=[0, 2]),
        agree(ranks, [*sharded[:2], *whole[2:]], by_scope),
        agree(ranks, sharded, without_part, missing=(2,) if rank == 1 else ()),
        agree(ranks, sharded, without_rank, missing=range(5) if rank == 3 else ()),
        agree(ranks, two_meshes, by_scope, flag=float(rank == 3), found=True, sizes=[4, 4]),
        agree(
            Ranks(across),
            stages,
            [5 * norm for norm in by_scope],
            flag=float(rank == 1),
            found=True,
            sizes=[4, 4],  # the dimension of one rank takes none
        ),
        agree(group, [t * 2**rank for t in whole], [85 * norm for norm in by_scope], sizes=[4]),
        agree(ranks, sharded, by_scope, flag=(2.0, -2.0, 1.0, -1.0)[rank], found=True),
    ]
    for bad, flag in itertools.product(range(4), FLAGS):
        mine, shape = flag if rank == bad else 0.0, (1,) if bad % 2 else ()
        same.append(agree(ranks, sharded, by_scope, flag=mine, found=flag != 0, shape=shape))
    # A sum that is not finite spoils neither flag nor other scopes.
    found, sums = torch.zeros(()), torch.ones(5).double()
    sums[0] = (math.inf, 1.0, math.nan, 1.0)[rank]
    first, *others = ranks.agree_(found, sums, sharded, [0, 1, 1, 2, 2], 3, sharded).tolist()
    assert (found.item(), others) == (0.0, [8.0, 8.0])
    assert math.isnan(first), "Inf + NaN"

    # Only the ranks of the group hear of an overflow on one of them.
    doubled = [2 * norm for norm in by_scope]
    agree(Ranks(across), whole, doubled, flag=2.0 * (rank == 2), found=rank in (0, 2))
    assert Ranks().is_local(whole)
    assert Ranks().is_local([nn.Parameter(whole[0])])
    assert Ranks().is_local([distribute_tensor(whole[0], cube["part"], (Shard(0),))])
    assert not Ranks().is_local([whole[0], sharded[1]])
    assert not Ranks(across).is_local(whole)
    assert copy.deepcopy(Ranks(across)).process_group is across
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Ranks(across))
    outside = dist.new_group([0])
    if rank > 0:
        with pytest.raises(TypeError, match="process_group must be a ProcessGroup"):
            Ranks(outside)
    return same


def test_agreements_are_those_of_a_single_process() -> None:
    first, *others = on_ranks(4, check_agreements)
    assert all(totals == first for totals in others)


def test_without_ranks_nothing_is_asked() -> None:
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup"):
        Ranks("gloo")  # type: ignore[arg-type]
    assert Ranks().is_local([])
    ranks = pickle.loads(pickle.dumps(Ranks()))
    found = torch.tensor(math.nan)
    p, q = torch.zeros(2), torch.zeros(3)
    totals = ranks.agree_(found, torch.tensor([2.0, 3.0]).double(), [p, q], [1, 1], 2, [p, q])
    assert found.item() == 1.0
    assert totals.tolist() == [0.0, 5.0]
