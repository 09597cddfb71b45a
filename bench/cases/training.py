"""Training steps of transformer blocks: fp16 beside fp32, and with compressed activations."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from . import gpt
from .registry import Workload, case, times_faster, times_the_time

HEAD = 64


class _Norm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms and the attention core in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(width), _Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).float().unflatten(-1, (3, -1, HEAD))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _blocks(count: int, width: int, batch: int, time: int) -> gpt.Model:
    model = nn.Sequential(*(_Block(width) for _ in range(count)))
    x, target = torch.randn(2, batch, time, width)

    def loss(run: nn.Module) -> torch.Tensor:
        return F.mse_loss(run(x.to(model[0].qkv.weight.dtype)).float(), target)

    return model, loss


def _fp16() -> Workload:
    make = partial(_blocks, 1, 256, 8, 128)
    ours = partial(gpt.ours, make, "fp16", params=torch.float16)
    parameters = sum(p.numel() for p in make()[0].parameters())
    return Workload(
        ours(),
        {"torch fp32": gpt.torchs(make)},
        partial(gpt.check, ours, partial(gpt.torchs, make), 0.01),
        flops=6.0 * parameters * 8 * 128,  # forward 2, backward 4 per parameter and token
    )


def _compressed(saved: str) -> Workload:
    make = partial(_blocks, 4, 512, 4, 256)
    as_saved = partial(gpt.ours, make, "bf16", params=torch.bfloat16)
    ours = partial(as_saved, saved=saved)
    return Workload(ours(), {"as saved": as_saved()}, partial(gpt.check, ours, as_saved, 0.01))


for _saved in ("int8", "int4"):
    case(
        f"training/saved/{_saved}",
        f"training step of 4 blocks, width 512, 1,024 tokens, bf16, compress_saved {_saved}",
        times_the_time(1.08),
        partial(_compressed, _saved),
    )
case(
    "training/fp16/block",
    "training step of one transformer block, width 256, 1,024 tokens, fp16 against fp32",
    times_faster(0.8),
    _fp16,
)
