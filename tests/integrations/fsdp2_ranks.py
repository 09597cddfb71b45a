"""A program for torchrun: FSDP2 by Accelerate, against a loop by hand, and by the Trainer.

torchrun --nproc-per-node 2 fsdp2_ranks.py FOLDER

Accelerate shards on GPUs only. Here its state is set to what it would be there; all else is its own
code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from by_hand import assert_same_bits
from test_transformers import LowPrecision, arguments, dataset, tiny_model
from torch.distributed.fsdp import FSDPModule, fully_shard

import mixprec
from mixprec.integrations.accelerate import attach

FOLDER, BF16 = Path(sys.argv[1]), torch.bfloat16
WRAP = "LlamaDecoderLayer"


def on_fsdp2() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[WRAP],
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
    )
    Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(64, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() for name, p in mixprec.optim.fp32_state_dict(model).items()}


def by_accelerate(cast_by_hand: bool) -> tuple[Any, list[torch.Tensor]]:
    """cast_by_hand: after prepare, in place of before."""
    accelerator = attach(Accelerator(cpu=True))
    assert accelerator.is_fsdp2
    model = mixprec.convert(tiny_model(), "bf16")
    if not cast_by_hand:
        mixprec.cast_parameters(model, BF16)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if cast_by_hand:
        mixprec.cast_parameters(model, BF16)
    norms = []
    for step in range(3):
        accelerator.backward(model(**batch(step)).loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(norm, optimizer.optimizer.grad_norm.float())
        norms.append(norm)
        optimizer.zero_grad()
    assert {p.dtype for p in model.parameters()} == {BF16}, "norms are in groups with weights"
    assert sum(isinstance(m, FSDPModule) for m in model.modules()) > 2
    return model, norms


def by_hand() -> tuple[Any, list[torch.Tensor]]:
    model = mixprec.convert(tiny_model(), "bf16")
    for module in model.modules():
        if type(module).__name__ == WRAP:
            fully_shard(module)
    fully_shard(model)
    mixprec.cast_parameters(model, BF16)
    optimizer, norms = mixprec.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.5), []
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.float())
        optimizer.zero_grad()
    return model, norms


def make_trainer(sharded: bool) -> LowPrecision:
    settings: Any = arguments(FOLDER, max_steps=4, save_strategy="no")
    settings.fsdp, settings.fsdp_config, settings.fsdp_plugin_args = True, {"version": 2}, None
    if sharded:
        on_fsdp2()
    return LowPrecision(tiny_model(), settings, train_dataset=dataset(), recipe="bf16", params=BF16)


def train() -> dict[str, torch.Tensor]:
    trainer = make_trainer(sharded=True)
    trainer.train()
    assert any(isinstance(m, FSDPModule) for m in trainer.model.modules())
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"losses": torch.tensor(losses), **whole(trainer.model)}


with pytest.raises(ValueError, match=r"args\.fsdp must be None where Accelerate does not shard"):
    make_trainer(sharded=False)
AcceleratorState._reset_state()
on_fsdp2()
(model, norms), (other, other_norms) = by_accelerate(False), by_accelerate(True)
assert_same_bits(whole(model), whole(other))
assert norms == other_norms
expected, expected_norms = by_hand()
assert_same_bits(whole(model), whole(expected))
assert norms == expected_norms
AcceleratorState._reset_state()
trained = train()
assert all(bool(torch.isfinite(t).all()) for t in trained.values())
states: list[Any] = [None, None]
dist.all_gather_object(states, trained)
assert_same_bits(states[0], states[1])
print("FSDP2 trains", flush=True)
dist.destroy_process_group()
