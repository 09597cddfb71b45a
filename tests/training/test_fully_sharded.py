"""16-bit parameters under FSDP2 and tensor parallelism."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_models import BF16, local_part, loss_of, make_model, whole, wrapped
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec.optim import SGD, AdamW, fp32_state_dict

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(32), make_model(32, 64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return mixprec.convert(nn.Sequential(Block(), Block(), nn.RMSNorm(32)), "bf16")


def shard(model: nn.Sequential, norms: bool = False) -> nn.Sequential:
    """norms: those of the blocks by themselves."""
    mesh = init_device_mesh("cpu", (2,))
    for module in model:
        if norms and isinstance(module, Block):
            fully_shard(module.norm, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: nn.Module, ranks: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """The FP32 values after some steps on the data of these ranks."""
    optimizer = AdamW(model.parameters(), lr=1e-3, **options)
    for step in range(3):
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 32, generator=generator).to(BF16)
            (loss_of(model(x), 0.5) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(fp32_state_dict(model).values())


def check_casts() -> None:
    """After fully_shard all of a block is cast, and what is behind it is FP32."""
    rank = dist.get_rank()
    first = whole(make_blocks().parameters())
    for options in ({}, {"master_weights": "remainder16"}):
        alone = mixprec.cast_parameters(make_blocks(), BF16)
        for block in alone[:2]:  # as in a group of 16 bits
            norm = block.norm
            mixprec.cast_parameters(nn.ParameterList([norm.weight]), BF16)
        model = mixprec.cast_parameters(shard(make_blocks()), BF16)
        assert [p.dtype for p in model.parameters()] == [BF16] * 10 + [torch.float32]
        assert all(map(torch.equal, whole(fp32_state_dict(model).values()), first))
        ours, theirs = trained(model, [rank], options), trained(alone, [0, 1], options)
        for a, b, start in zip(ours, theirs, first, strict=True):
            assert (a - b).abs().max() < 0.1 * (b - start).abs().max()
    with pytest.raises(ValueError, match=r"^cast_parameters: model must not have run yet"):
        mixprec.cast_parameters(model, torch.float32)


def check_order() -> None:
    """Cast before, a block has two dtypes; norms that are wrapped by themselves may have theirs."""
    model = shard(mixprec.cast_parameters(make_blocks(), BF16))
    message = r"^AdamW: params .* one dtype, got .*norm.weight in torch.float32.*call cast_param"
    with pytest.raises(ValueError, match=message):
        AdamW(model.parameters())
    mixprec.cast_parameters(model, BF16)
    trained(model, [0], {})
    for before in (True, False):
        model = make_blocks()
        model = mixprec.cast_parameters(model, BF16) if before else model
        model = shard(model, norms=True)
        model = model if before else mixprec.cast_parameters(model, BF16)
        assert model[0].norm.weight.dtype == torch.float32
        trained(model, [0], {})
    model = shard(make_blocks())
    with pytest.raises(ValueError, match=r"^cast_parameters: keep_fp32 .* got 1\.norm\.weight"):
        mixprec.cast_parameters(model, BF16, keep_fp32=["1.norm.*"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def check_full_state() -> None:
    """Remainders of 16 bits are gathered, saved, and set again in parts."""
    options = StateDictOptions(full_state_dict=True)
    for kind in ("fsdp", "ddp"):
        model = mixprec.cast_parameters(make_model(32, 50, 7), BF16)
        outer = wrapped(kind, model)
        optimizer = SGD(outer.parameters(), lr=1e-2, momentum=0.9, master_weights="remainder16")
        loss_of(outer(torch.ones(4, 32, dtype=BF16)), 0.5).backward()
        optimizer.step()
        values = whole(fp32_state_dict(model).values())
        state = copy.deepcopy(get_optimizer_state_dict(outer, optimizer, options=options))
        parts = [each["remainder"] for each in state["state"].values()]
        assert [(t.shape, t.dtype) for t in parts] == [(v.shape, torch.float16) for v in values]
        with torch.no_grad():
            for each in optimizer.state.values():
                each["remainder"].zero_()
        set_optimizer_state_dict(outer, optimizer, copy.deepcopy(state), options=options)
        assert all(map(torch.equal, whole(fp32_state_dict(model).values()), values))
        again = SGD(outer.parameters(), momentum=0.9, master_weights="remainder16")
        for each in state["state"].values():  # halfway between two neighbours
            each["remainder"].view(torch.int16).fill_(-(2**15))
        set_optimizer_state_dict(outer, again, state, options=options)
        again.param_groups[0]["lr"] = 0.0
        again.step()
        for p in outer.parameters():
            assert bool((local_part(again.state[p]["remainder"]) == -(2**15)).all()), kind


def check_grad_dtype() -> None:
    options: dict[str, Any] = {"grad_dtype": torch.float32}
    for kind, instead in (("ddp", "reduce_gradients_in_fp32"), ("fsdp", "reduce_dtype")):
        outer = wrapped(kind, make_model(32, 32).to(BF16))
        with pytest.raises(ValueError, match=rf"^AdamW: grad_dtype must be None .*{instead}"):
            AdamW(outer.parameters(), **options)
    model = make_model(32, 32).to(BF16)
    optimizer = AdamW(model.parameters(), **options)
    outer = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"^AdamW: grad_dtype must be None"):
        optimizer.zero_grad()
    AdamW(make_model(32, 32).to(BF16).parameters(), **options)  # of no wrapper


def check_torchs_optimizer() -> None:
    """Its step frees what it does not take, and says so, as in one process."""
    for options in ({}, {"dtype": torch.float32}):
        model = mixprec.cast_parameters(make_model(32, 32), BF16)
        first = whole(fp32_state_dict(model).values())
        wrapped("fsdp", model)
        model.to(**options)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        warns = contextlib.nullcontext() if options else pytest.warns(UserWarning, match="are lost")
        with warns:
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        kept = first if options else [t.to(BF16) for t in first]
        assert all(map(torch.equal, whole(model.parameters()), kept))
        assert all(
            map(torch.equal, whole(fp32_state_dict(model).values()), map(torch.Tensor.float, kept))
        )


def check_writes() -> None:
    """A write to a parameter between two steps, and to the part of a rank, is one to its master."""
    for way in ("fsdp", "tensor parallel"):
        for options in ({}, {"master_weights": "remainder16"}):
            alone = mixprec.cast_parameters(make_model(32, 32), BF16)
            model = mixprec.cast_parameters(make_model(32, 32), BF16)
            if way == "fsdp":
                wrapped("fsdp", model)
            else:
                parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
            for m in (alone, model):
                optimizer = AdamW(m.parameters(), lr=1e-3, **options)
                for step in range(5):
                    for p in m.parameters():
                        p.grad = torch.ones_like(p)
                        if step:
                            (p if step % 2 else local_part(p)).detach().mul_(1.5)
                    optimizer.step()
            ours, theirs = (whole(fp32_state_dict(m).values()) for m in (model, alone))
            assert all(map(torch.equal, ours, theirs)), (way, options)


def casts_on_two() -> None:
    for check in (check_casts, check_order):
        check()


def rest_on_two() -> None:
    for check in (check_full_state, check_grad_dtype, check_writes, check_torchs_optimizer):
        check()


def test_casts_on_two_ranks() -> None:
    on_ranks(2, casts_on_two)


def test_gradients_and_states_on_two_ranks() -> None:
    on_ranks(2, rest_on_two)
