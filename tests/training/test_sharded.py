"""Models that FSDP2 has sharded: what has to be done before."""

from __future__ import annotations

import pytest
import torch
from cases import normal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mixprec


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))


def test_convert_comes_first(one_rank: None) -> None:
    model = nn.Sequential(block(), block())
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        ValueError, match=r"^convert: the parameters of 1\.1 are sharded: convert b"
    ):
        mixprec.convert(model, "bf16")
    assert type(model[0][1]) is nn.Linear, "nothing is changed"


def test_a_block_with_norms_in_fp32_trains_in_16_bits(one_rank: None) -> None:
    """FSDP2 wants one dtype in a block: FP32, gathered in 16 bits. The shards are the masters."""
    model = nn.Sequential(*(mixprec.convert(block(), "fp8") for _ in range(2)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for _ in range(5):
        loss = model(normal((4, 16), torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
