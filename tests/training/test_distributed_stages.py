"""Ranks that hold different params, in a process group; sharded models; the example."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mixprec


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


def test_convert_comes_before_sharding(one_rank: None) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    message = r"^convert: the parameters of 1\.1 are sharded: convert b"
    with pytest.raises(ValueError, match=message):
        mixprec.convert(model, "bf16")
    assert type(model[0][1]) is nn.Linear, "nothing is changed"


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
