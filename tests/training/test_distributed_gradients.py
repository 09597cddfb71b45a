"""reduce_gradients_in_fp32: gradients of 16-bit params averaged in FP32, on two and four ranks."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_models import BF16, FP16, loss_of, make_model, whole, wrapped
from ranks import TIMEOUT, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.distributed import reduce_gradients_in_fp32
from mixprec.memory.compress_saved import recorded
from mixprec.memory.packed import Saved


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


# compress_saved on two ranks, with and without activation checkpointing


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*backward hooks.*")]


def gradients(kind: str, bits: Any, recompute: bool) -> tuple[list[torch.Tensor], int]:
    """Those of one step, and how many tensors were compressed."""
    model: Any = make_model(64, 128, 96, 1)
    if bits and kind == "convert":
        mixprec.convert(model, "bf16", saved=bits)
    wrap, dtype = ("ddp", torch.float32) if kind == "ddp" else ("fsdp", BF16)
    model = wrapped(wrap, model, dtype)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    found: list[Saved] = []
    torch.manual_seed(3)
    with (
        recorded(lambda _, t: found.append(t) if isinstance(t, Saved) else None),
        mixprec.compress_saved(bits) if bits and kind != "convert" else nullcontext(),
    ):
        y = checkpoint(model, x * 1, use_reentrant=False) if recompute else model(x * 1)
    loss_of(y, 0.0).backward()
    return whole(p.grad for p in model.parameters()), len(found)


def all_kinds() -> dict[tuple[str, bool], Any]:
    result = {}
    for kind, recompute in itertools.product(("ddp", "fsdp", "convert"), (False, True)):
        plain, _ = gradients(kind, None, False)
        (first, count), (again, _) = (gradients(kind, "int8", recompute) for _ in range(2))
        result[kind, recompute] = first, again, plain, count
    return result


def test_gradients_are_close_and_the_same_each_time() -> None:
    ranks = on_ranks(2, all_kinds)
    for name, (first, again, plain, count) in ranks[0].items():
        assert all(map(torch.equal, first, again)), name
        assert all(map(torch.equal, first, ranks[1][name][0])), name  # reduced over the ranks
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(first, plain, strict=True)]
        assert max(errors) < 0.1, name
        # Inside a checkpoint nothing is saved but its input, as it is. A model of convert(saved=)
        # is inside of the checkpoint itself.
        assert (count == 0) == (name in (("ddp", True), ("fsdp", True))), name
        assert (max(errors) > 0) == (count > 0), name


# Ranks that hold different params, in a process group; sharded models; the example


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
        optim: Any = mixprec.optim.AdamW(params, lr=0.1, max_grad_norm=0.5, process_group=group)
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


def check_stages() -> None:
    """Two ranks with a stage each are one process with both."""
    rank = dist.get_rank()
    for optimizer in ("mixprec", "fused", "foreach"):
        alone, mine = train_stages([0, 1], optimizer), train_stages(None, optimizer)
        assert mine["scales"] == alone["scales"] == [1024, 1024, 512, 512, 512]
        norms = [n for step, n in enumerate(alone["norms"]) if rank == 0 or step != 1]
        assert mine["norms"] == pytest.approx(norms, rel=1e-14, nan_ok=True)
        assert all(map(torch.equal, mine["params"], alone["params"][2 * rank :]))


def test_a_process_group_of_ranks_with_different_params() -> None:
    on_ranks(2, check_stages)


def test_a_layer_is_converted_before_it_is_sharded(one_rank: None) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)))
    fully_shard(model[1][1], mesh=init_device_mesh("cpu", (1,)))
    message = r"^convert: 1\.1 must not be wrapped by fully_shard yet"
    with pytest.raises(ValueError, match=message):
        mixprec.convert(model, "bf16")
    assert type(model[0][1]) is nn.Linear, "nothing is changed"


@pytest.mark.parametrize(
    "arguments",
    [["--way=fsdp", "--fp32-params"], ["--way=ddp", "--recipe=fp8-delayed"], ["--way=ep"]],
    ids=["fsdp", "ddp-fp8-delayed", "ep"],
)
def test_the_example_trains(arguments: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 500)
    example = Path(__file__).resolve().parents[2] / "examples" / "train_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tiny = [f"--text={text}", "--steps=20", "--blocks=2", "--context=16"]
    result = subprocess.run(
        [*torchrun, str(example), *tiny, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    first, last = re.findall(r"step +\d+: ([\d.]+) bits per byte", result.stdout)
    assert float(last) < 0.7 * float(first)
