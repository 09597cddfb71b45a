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

from mixprec.distributed import Ranks, agree_found_

FLAGS = (0.0, 1.0, 2.0, -1.0, math.inf, math.nan)
# Five rows over four ranks are 2, 2, 1 and 0; one row leaves three ranks without any.
SHAPES = ((5, 3), (1,), (7, 2), (4, 4), (0, 3))
SCOPES = [0, 2, 0, 2, 0]


def grads_of(shapes: tuple[tuple[int, ...], ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def square_norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().square().sum()


def agree(
    ranks: Ranks,
    params: list[Any],
    scopes: list[int],
    flag: float = 0.0,
    *,
    missing: tuple[int, ...] = (),
    shape: tuple[int, ...] = (),
) -> dict[str, Any]:
    """One agreement, the params being their own gradients, and how many numbers were reduced."""
    found = torch.full(shape, flag)
    here = [i for i in range(len(params)) if i not in missing]
    mine = [params[i] for i in here]
    sums = [square_norm(p.to_local() if isinstance(p, DTensor) else p) for p in mine]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        totals = ranks.agree_(
            found,
            torch.stack(sums) if here else torch.zeros(0).double(),
            mine,
            [scopes[i] for i in here],
            3,
            params,
        )
    assert found.shape == shape
    assert totals.dtype == torch.float64
    sizes = [call.args[0].numel() for call in calls.call_args_list]
    return {"found": found.item(), "totals": totals.tolist(), "sizes": sizes}


def agreements() -> dict[str, Any]:
    """Everything a rank is asked below, on four ranks."""
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "copy", "part"))
    pair = cube["copy", "part"]  # ranks 0 and 1, ranks 2 and 3: two dimensions, not all ranks
    across = cube["stage"].get_group()  # ranks 0 and 2, ranks 1 and 3
    whole = grads_of(SHAPES)

    def shards(mesh: DeviceMesh, *placements: Any) -> list[Any]:
        return [distribute_tensor(t, mesh, placements) for t in whole]

    ranks, sharded = Ranks(), shards(line, Shard(0))
    results: dict[str, Any] = {
        "sharded": agree(ranks, sharded, SCOPES),
        "again": agree(ranks, sharded, SCOPES),
        "other scopes": agree(ranks, sharded, [1, 1, 1, 1, 1]),
        "replicated": agree(ranks, shards(line, Replicate()), SCOPES),
        "hybrid": agree(ranks, shards(grid, Replicate(), Shard(0)), SCOPES),
        "two shards": agree(
            ranks, [distribute_tensor(t, grid, (Shard(1), Shard(0))) for t in whole[2:4]], [0, 2]
        ),
        "plain": agree(ranks, [*sharded[:2], *whole[2:]], SCOPES),
        "missing on 1": agree(ranks, sharded, SCOPES, missing=(2,) if rank == 1 else ()),
        "nothing on 3": agree(ranks, sharded, SCOPES, missing=tuple(range(5)) * (rank == 3)),
        "meshes": agree(
            ranks,
            [*shards(line, Shard(0))[:2], *shards(grid["shard"], Shard(0))[2:]],
            SCOPES,
            flag=float(rank == 3),
        ),
        "stages": agree(
            Ranks(across),
            [(1 + rank // 2) * t for t in shards(pair, Replicate(), Replicate())],
            SCOPES,
            flag=float(rank == 1),
        ),
        "group": agree(Ranks(dist.group.WORLD), [t * 2**rank for t in whole], SCOPES),
    }
    for bad, flag in itertools.product(range(4), FLAGS):
        mine = flag if rank == bad else 0.0
        shape = (1,) if bad % 2 else ()
        results[f"{flag} on {bad}"] = agree(ranks, sharded, SCOPES, mine, shape=shape)
    opposite = (2.0, -2.0, 1.0, -1.0)[rank]
    results["opposite flags"] = agree(ranks, sharded, SCOPES, opposite)
    # A sum that is not finite spoils neither flag nor other scopes.
    found, sums = torch.zeros(()), torch.ones(5).double()
    sums[0] = (math.inf, 1.0, math.nan, 1.0)[rank]
    totals = ranks.agree_(found, sums, sharded, [0, 1, 1, 2, 2], 3, sharded)
    results["inf sum"] = {"found": found.item(), "totals": totals.tolist(), "sizes": []}

    for name, group in (("flag", None), ("flag of group", across)):
        found = torch.tensor(2.0 if rank == 2 else 0.0)
        agree_found_(found, sharded if group is None else [], group)
        results[name] = {"found": found.item(), "totals": [], "sizes": []}

    results["alone"] = [
        Ranks().alone(whole),
        Ranks().alone([nn.Parameter(whole[0])]),
        Ranks().alone([whole[0], sharded[1]]),
        Ranks(across).alone(whole),
        Ranks().alone([distribute_tensor(whole[0], cube["part"], (Shard(0),))]),
    ]
    outside = dist.new_group([0])
    try:
        Ranks(outside)
    except TypeError as error:
        results["outside"] = str(error)
    copied = copy.deepcopy(Ranks(across))
    assert copied.process_group is across
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Ranks(across))
    return results


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    return on_ranks(4, agreements)


def expected(scopes: list[int], factors: tuple[float, ...] = (1,) * 5) -> list[float]:
    totals = [0.0, 0.0, 0.0]
    for grad, scope, factor in zip(grads_of(SHAPES), scopes, factors, strict=True):
        totals[scope] += factor * square_norm(grad).item()
    return totals


def test_squared_norms_are_those_of_a_single_process(asked: list[dict[str, Any]]) -> None:
    parts = grads_of(SHAPES)
    norms = [square_norm(g).item() for g in parts]
    all_of = expected(SCOPES)
    without, rest = expected(SCOPES), expected(SCOPES)
    without[0] -= square_norm(parts[2].chunk(4)[1]).item()
    for i in (2, 3):
        rest[SCOPES[i]] -= square_norm(parts[i].chunk(4)[3]).item()
    totals = {
        **dict.fromkeys(("sharded", "again", "replicated", "hybrid", "plain"), all_of),
        "other scopes": [0, sum(norms), 0],
        "two shards": [norms[2], 0, norms[3]],
        "meshes": all_of,  # one of all ranks, and two of two ranks that hold the same
        # Two pipeline stages, whose gradients differ by a factor of 2, of two replicas each.
        "stages": expected(SCOPES, (5,) * 5),
        "group": expected(SCOPES, (1 + 4 + 16 + 64,) * 5),
        "missing on 1": without,
        "nothing on 3": rest,
        **{f"{flag} on {bad}": all_of for bad, flag in itertools.product(range(4), FLAGS)},
    }
    for answers, (case, want) in itertools.product(asked, totals.items()):
        assert answers[case]["totals"] == pytest.approx(want, rel=1e-14), case
    for answers in asked:  # a sum that is not finite stays in its scope
        first, *others = answers["inf sum"]["totals"]
        assert math.isnan(first)  # Inf + NaN
        assert others == [8.0, 8.0]


def test_all_ranks_get_the_same_bits(asked: list[dict[str, Any]]) -> None:
    # NaN is not equal to itself; a group of two ranks does not tell the others.
    cases = [c for c in asked[0] if c not in ("alone", "inf sum", "flag of group", "outside")]
    assert len(cases) > 30
    for case, answers in itertools.product(cases, asked[1:]):
        assert answers[case]["totals"] == asked[0][case]["totals"], case
        assert answers[case]["found"] == asked[0][case]["found"], case


def test_a_flag_on_one_rank_is_set_on_all(asked: list[dict[str, Any]]) -> None:
    flags = {f"{flag} on {bad}": flag != 0 for bad, flag in itertools.product(range(4), FLAGS)}
    flags |= dict.fromkeys(("meshes", "stages", "flag", "opposite flags"), True)
    flags |= dict.fromkeys(("sharded", "again", "replicated", "hybrid", "plain", "inf sum"), False)
    for rank, answers in enumerate(asked):
        for case, want in {**flags, "flag of group": rank in (0, 2)}.items():
            assert answers[case]["found"] == float(want), case


def test_one_small_all_reduce_per_mesh(asked: list[dict[str, Any]]) -> None:
    """A hybrid mesh is one group, of all ranks; a dimension of one rank takes none."""
    sizes = {"sharded": [4], "hybrid": [4], "group": [4], "meshes": [4, 4], "stages": [4, 4]}
    for answers in asked:
        assert {case: answers[case]["sizes"] for case in sizes} == sizes
        assert answers["alone"] == [True, True, False, False, True]


def test_process_group_must_be_one_that_this_rank_is_in(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup"):
        Ranks("gloo")  # type: ignore[arg-type]
    assert "outside" not in asked[0]
    for answers in asked[1:]:
        assert "process_group must be a ProcessGroup" in answers["outside"]


def test_without_ranks_nothing_is_asked() -> None:
    assert Ranks().alone([])
    ranks = pickle.loads(pickle.dumps(Ranks()))
    found = torch.tensor(math.nan)
    p, q = torch.zeros(2), torch.zeros(3)
    totals = ranks.agree_(found, torch.tensor([2.0, 3.0]).double(), [p, q], [1, 1], 2, [p, q])
    assert found.item() == 1.0
    assert totals.tolist() == [0.0, 5.0]
