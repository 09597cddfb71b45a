"""Ranks that skip and clip together, gradients averaged in FP32: on two and four processes."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_models import (
    BF16,
    FP16,
    gradients_in_turn,
    local_part,
    loss_of,
    make_model,
    whole,
    wrapped,
)
from ranks import KILLED, TIMEOUT, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec._local_gradients import gradient_of
from mixprec.distributed import Ranks, agree_found_, reduce_gradients_in_fp32

FLAGS = (0.0, 1.0, 2.0, -1.0, math.inf, math.nan)
# Five rows over four ranks are 2, 2, 1 and 0; one row leaves three ranks without any.
SHAPES = ((5, 3), (1,), (7, 2), (4, 4), (0, 3))
SCOPES = [0, 2, 0, 2, 0]


@contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """How many numbers each all-reduce of this process took."""
    sizes: list[int] = []
    real = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = real


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
    """One agreement, the params being their own gradients, and what it took."""
    found = torch.full(shape, flag)
    here = [i for i in range(len(params)) if i not in missing]
    parts = [params[i].to_local() if hasattr(params[i], "to_local") else params[i] for i in here]
    sums = torch.stack([square_norm(t) for t in parts]) if here else torch.zeros(0).double()
    with counted_all_reduces() as sizes:
        mine = [params[i] for i in here]
        totals = ranks.agree_(found, sums, mine, [scopes[i] for i in here], 3, params)
    assert found.shape == shape
    assert totals.dtype == torch.float64
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


def average(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [
        torch.stack([t.float() for t in ts]).sum(0) / len(ts) for ts in zip(*parts, strict=True)
    ]


def check_hooks() -> None:
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


@dataclass(frozen=True)
class Setup:
    """One way to train on several ranks."""

    wrap: str  # "ddp", "fsdp", or "hsdp": two replicas of two shards
    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    optimizer: str = "mixprec"  # or of torch: "fused", or "foreach", which clips through torch
    hook: bool = False

    def __str__(self) -> str:
        parts = [self.wrap, str(self.params)[6:], str(self.compute)[6:], self.optimizer]
        return "-".join([*parts, *(["hook"] * self.hook)])


MAX_NORM, STEPS, BAD_STEP, BAD_RANK = 0.02, 6, 2, 1
SIZES = (6, 5, 7, 3, 1)  # over four ranks uneven shards, and empty ones
MAX_NORM, STEPS, BAD_STEP, BAD_RANK = 0.02, 6, 2, 1


def data(setup: Setup, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(4, n, generator=generator) for n in (6, 1))
    return x.to(setup.compute), y


class Training:
    """A model, its optimizer and scaler; on several ranks, or alone with the data of them all."""

    def __init__(self, setup: Setup, seed: int = 0, alone_with: int | None = None) -> None:
        self.setup, self.world = setup, alone_with
        self.model: nn.Module = make_model(*SIZES, seed=seed).to(setup.params)
        if alone_with is None:
            cast = setup.compute if setup.compute != setup.params else None
            self.model = wrapped(setup.wrap, self.model, cast)
            if setup.hook:
                reduce_gradients_in_fp32(self.model)
        self.params = list(self.model.parameters())
        # An eps well above the rounding errors of these small gradients, which Adam would magnify.
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4}
        self.optimizer: torch.optim.Optimizer
        if setup.optimizer == "mixprec":
            options["max_grad_norm"] = MAX_NORM
            self.optimizer = mixprec.optim.AdamW(self.params, **options)
        else:
            options[setup.optimizer] = True
            self.optimizer = torch.optim.AdamW(self.params, **options)
        self.scaler = mixprec.GradScaler(init_scale=2.0**10, growth_interval=2)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        if self.world is None:
            x, y = data(self.setup, step, dist.get_rank())
            self.scaler.scale(loss_of(self.model(x), y)).backward()
            return
        ranks = ([data(self.setup, step, rank)] for rank in range(self.world))
        grads = gradients_in_turn(self.model, self.scaler, self.setup.compute, ranks)
        for p, grad in zip(self.params, grads, strict=True):
            if self.setup.hook:
                p.main_grad = grad
            else:
                p.grad = grad.to(p.dtype)

    def overflow(self, rank: int) -> None:
        """An Inf in one gradient; where it is sharded, in the part of one rank."""
        for p in self.params:
            grad = gradient_of(p)
            assert grad is not None
            part = local_part(grad)
            if part.numel() and (part is grad or rank == dist.get_rank()):
                part.view(-1)[-1] = math.inf
                return

    def step(self) -> float | None:
        """Clip, step and update; the gradients' norm, if the setup clips."""
        norm = None
        if self.setup.optimizer == "foreach":
            self.scaler.unscale_(self.optimizer)
            norm = whole([nn.utils.clip_grad_norm_(self.params, MAX_NORM)])[0]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(self.optimizer, mixprec.optim.AdamW):
            norm = self.optimizer.grad_norm
        return None if norm is None else norm.item()

    def run(self, first: int, last: int, *, overflow: bool = False) -> dict[str, list[Any]]:
        """Norm and scale after each step, and the weights around the step that may overflow."""
        log: dict[str, list[Any]] = {"norms": [], "scales": [], "weights": []}
        for step in range(first, last):
            self.backward(step)
            if overflow and step == BAD_STEP:
                self.overflow(BAD_RANK)
            log["norms"].append(self.step())
            log["scales"].append(self.scaler.get_scale())
            if step in (BAD_STEP - 1, BAD_STEP):
                log["weights"].append(whole(self.params))
        return log

    def state(self) -> dict[str, list[torch.Tensor]]:
        """All that a checkpoint holds of the optimizer and the model, unsharded."""
        states = [self.optimizer.state[p] for p in self.params]
        found = {key: whole(s[key] for s in states) for key in states[0]}
        return {"param": whole(self.params), **found}


def train(setup: Setup, alone_with: int | None = None) -> dict[bool, dict[str, Any]]:
    """STEPS steps without and with an overflow."""
    logs = {}
    for overflow in (False, True):
        training = Training(setup, alone_with=alone_with)
        log = training.run(0, STEPS, overflow=overflow)
        skipped = int(training.scaler.skipped)
        logs[overflow] = {**log, "state": training.state(), "skipped": skipped}
    return logs


SETUPS: dict[int, tuple[Setup, ...]] = {
    2: (
        Setup("ddp"),
        Setup("ddp", optimizer="fused"),
        Setup("ddp", params=BF16, compute=BF16),
        Setup("fsdp", params=FP16, compute=FP16),
        Setup("fsdp", params=BF16, compute=BF16),
    ),
    4: (
        Setup("ddp", params=BF16, compute=BF16, hook=True),
        Setup("fsdp", params=BF16, compute=BF16),
        Setup("fsdp"),
        Setup("fsdp", compute=BF16),
        Setup("fsdp", compute=BF16, optimizer="fused"),
        Setup("fsdp", compute=BF16, optimizer="foreach"),
        Setup("hsdp", compute=BF16),
    ),
}


def train_all() -> dict[Setup, dict[bool, dict[str, Any]]]:
    return {setup: train(setup) for setup in SETUPS[dist.get_world_size()]}


@pytest.mark.parametrize("world", SETUPS)
def test_training_is_that_of_a_single_process(world: int) -> None:
    by_rank = on_ranks(world, train_all)
    for setup in SETUPS[world]:
        results = [each[setup] for each in by_rank]
        check_training(setup, train(setup, alone_with=world), results)


def check_training(setup: Setup, alone: dict[bool, Any], results: list[dict[bool, Any]]) -> None:
    for overflow, result in itertools.product((False, True), results):
        mine, expected, first = result[overflow], alone[overflow], results[0][overflow]
        assert mine["skipped"] == overflow
        assert mine["scales"] == expected["scales"]
        assert mine["scales"][BAD_STEP] == 2.0**10 * (1 if overflow else 2)
        assert all(count == STEPS - overflow for count in mine["state"]["step"])
        assert ("master" in mine["state"]) == (setup.params != torch.float32)
        if setup.optimizer != "fused":
            assert mine["norms"] == pytest.approx(expected["norms"], rel=1e-5, nan_ok=True)
            finite = [norm for norm in mine["norms"] if math.isfinite(norm)]
            assert len(finite) == STEPS - overflow
            assert min(finite) > MAX_NORM, "nothing is clipped: this would test nothing"
        for key, values in mine["state"].items():
            # A rounding up here may have been one down there.
            rtol = 2**-7 if values[0].dtype in (BF16, FP16) else 1e-5
            torch.testing.assert_close(values, expected["state"][key], rtol=rtol, atol=1e-6)
            assert all(map(torch.equal, values, first["state"][key])), f"{key} differs by rank"
        # Exactly the step with the Inf was skipped.
        assert all(map(torch.equal, *mine["weights"])) == overflow


SHARDED = Setup("fsdp", params=BF16, compute=BF16)


def dcp_state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "scaler": training.scaler.state_dict()}


def before_and_after(training: Training) -> dict[str, Any]:
    """The state now, and at the end of the training."""
    state, scaler = training.state(), training.scaler.state_dict()
    training.run(3, STEPS)
    return {"saved": state, "scaler": scaler, "end": training.state()}


def save_in_the_middle(path: str) -> dict[str, Any]:
    training = Training(SHARDED)
    training.run(0, 3, overflow=True)
    dcp.save(dcp_state(training), checkpoint_id=path)
    return before_and_after(training)


def resume(path: str) -> dict[str, Any]:
    training = Training(SHARDED, seed=1)
    state = dcp_state(training)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    training.scaler.load_state_dict(state["scaler"])
    return before_and_after(training)


def test_a_distributed_checkpoint_resumes(tmp_path: Path) -> None:
    """On as many ranks as it was saved from, on more and on fewer."""
    paths = {world: str(tmp_path / f"of {world}") for world in (2, 4)}
    saved_by = {w: on_ranks(w, save_in_the_middle, path=path)[0] for w, path in paths.items()}
    for before, after in ((2, 2), (4, 2), (2, 4)):
        saved, results = saved_by[before], on_ranks(after, resume, path=paths[before])
        for result in results:
            assert result["scaler"] == saved["scaler"]
            for when in ("saved", "end") if before == after else ("saved",):
                assert result[when].keys() == {"param", "master", "exp_avg", "exp_avg_sq", "step"}
                for key, values in result[when].items():
                    want = BF16 if key == "param" else torch.float32
                    assert all(value.dtype == want for value in values), key
                    assert all(map(torch.equal, values, saved[when][key])), (when, key)
        steps, masters = saved["saved"]["step"], saved["saved"]["master"]
        assert all(step == 2 for step in steps), "of three steps, one overflowed"
        wide = [not torch.equal(m, m.to(BF16).float()) for m in masters]
        assert sum(wide) > 5, "the masters hold no more than the params: rounding would not show"


def lose_a_rank(how: str) -> dict[str, Any]:
    """Two steps; then rank 1 is gone, or too slow, after its backward."""
    training = Training(Setup("fsdp"))
    training.run(0, 2)
    training.backward(2)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)  # whatever the others still have to receive is on its way
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)  # longer than the others wait
        return {}
    before = [local_part(p).detach().clone() for p in training.params]
    start = time.monotonic()
    try:
        training.step()
    except RuntimeError as error:
        message, cause = str(error), error.__cause__
    return {
        "seconds": time.monotonic() - start,
        "message": message,
        "caused": isinstance(cause, RuntimeError),
        "unchanged": all(map(torch.equal, before, map(local_part, training.params))),
    }


@pytest.mark.parametrize(("how", "timeout"), [("killed", 20.0), ("slow", 5.0)])
def test_the_others_end_when_a_rank_is_lost(how: str, timeout: float) -> None:
    results = on_ranks(4, lose_a_rank, how=how, timeout=timeout)
    assert results.pop(1) == (KILLED if how == "killed" else {})
    for rank, result in zip((0, 2, 3), results, strict=True):
        assert f"rank {rank} could not agree with the other ranks" in result["message"]
        assert "most likely one of them has ended" in result["message"]
        assert result["caused"]
        assert result["unchanged"]
        assert result["seconds"] < 15


def stage_params(stage: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(stage)
    return [nn.Parameter(torch.randn(n, generator=generator)) for n in (5, 2 + stage)]


def stage_grads(stage: int, step: int) -> list[torch.Tensor | None]:
    """Stage 1 has no gradients in step 1, and an Inf in step 2."""
    if stage == 1 and step == 1:
        return [None, None]
    generator = torch.Generator().manual_seed(10 * step + stage)
    first, second = (1024 * torch.randn(n, generator=generator) for n in (5, 2 + stage))
    if stage == 1 and step == 2:
        first[-1] = -math.inf
    return [first, second]


def train_stages(stages: list[int] | None, optimizer: str) -> dict[str, Any]:
    """The stages at hand, of which None means: that of this rank, in a group with the others."""
    group = dist.group.WORLD if stages is None else None
    here = [dist.get_rank()] if stages is None else stages
    params = [p for stage in here for p in stage_params(stage)]
    scaler = mixprec.GradScaler(init_scale=1024.0, process_group=group)
    if optimizer == "mixprec":
        optim: torch.optim.Optimizer = mixprec.optim.AdamW(
            params, lr=0.1, max_grad_norm=0.5, process_group=group
        )
    else:
        optim = torch.optim.AdamW(params, lr=0.1, **{optimizer: True})
    scales, norms = [], []
    for step in range(5):
        scaler.scale(torch.zeros(()))  # makes the scale
        grads = [g for stage in here for g in stage_grads(stage, step)]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        scaler.step(optim)
        scaler.update()
        scales.append(scaler.get_scale())
        if optimizer == "mixprec" and any(g is not None for g in grads):
            norms.append(optim.grad_norm.item())
    return {"scales": scales, "norms": norms, "params": [p.detach() for p in params]}


OPTIMIZERS = ("mixprec", "fused", "foreach")


def train_all_stages() -> dict[str, Any]:
    return {optimizer: train_stages(None, optimizer) for optimizer in OPTIMIZERS}


def test_a_process_group_of_ranks_with_different_params() -> None:
    by_rank = on_ranks(2, train_all_stages)
    for optimizer in OPTIMIZERS:
        alone = train_stages([0, 1], optimizer)
        results = [each[optimizer] for each in by_rank]
        assert alone["scales"] == [1024, 1024, 512, 512, 512]
        for rank, result in enumerate(results):
            assert result["scales"] == alone["scales"]
            norms = [n for step, n in enumerate(alone["norms"]) if rank == 0 or step != 1]
            assert result["norms"] == pytest.approx(norms, rel=1e-14, nan_ok=True)
        params = [p for result in results for p in result["params"]]
        assert all(map(torch.equal, params, alone["params"]))


@pytest.mark.parametrize(
    "arguments",
    [["--fsdp", "--dtype=fp16"], ["--recipe=fp8-delayed"]],
    ids=["fsdp-fp16", "ddp-fp8-delayed"],
)
def test_the_example_trains(arguments: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 500)
    example = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tiny = [f"--text={text}", "--steps=20", "--layers=1", "--width=64", "--context=16", "--lr=1e-2"]
    result = subprocess.run(
        [*torchrun, str(example), *tiny, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    first, last = re.findall(r"step +\d+: ([\d.]+) bits per byte, 0 skipped", result.stdout)
    assert float(last) < 0.7 * float(first)
