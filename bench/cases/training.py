"""Training steps of transformer blocks: fp16 beside fp32, and with compressed activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import mixprec
from mixprec.optim import AdamW

from .. import verify
from .registry import Workload, case, times_faster, times_the_time

BATCH, TIME, WIDTH, HEAD = 8, 128, 256, 64
TOKENS = BATCH * TIME


class _Norm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms and the attention core in fp32."""

    def __init__(self, width: int = WIDTH) -> None:
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


def _block() -> nn.Module:
    torch.manual_seed(0)
    return _Block()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(BATCH, TIME, WIDTH, generator=generator) for _ in range(2))
    return x, target


def _loss(model: nn.Module, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    x, target = _data()
    low = x.to(dtype)
    return lambda: F.mse_loss(model(low).float(), target)


def _fp32() -> Callable[[], float]:
    model = _block()
    loss, optimizer = _loss(model, torch.float32), torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.item()

    return step


def _fp16() -> Callable[[], float]:
    model = mixprec.convert(mixprec.cast_parameters(_block(), torch.float16), "fp16")
    loss = _loss(model, torch.float16)
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    scaler = mixprec.GradScaler("cpu")

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value.item()

    return step


def _check() -> str | None:
    """Both learn alike: after five steps the losses agree within 1 %, and are lower."""
    fp16, fp32 = _fp16(), _fp32()
    losses = [(fp16(), fp32()) for _ in range(6)]
    (first, _), (got, expected) = losses[0], losses[-1]
    if not got < first:
        return f"the fp16 loss does not fall: {first:.4f}, then {got:.4f}"
    return verify.close("loss", [torch.tensor(got)], [torch.tensor(expected)], rtol=0.01, atol=0.0)


def _workload() -> Workload:
    parameters = sum(p.numel() for p in _block().parameters())
    flops = 6.0 * parameters * TOKENS  # forward 2, backward 4 per parameter and token
    return Workload(_fp16(), {"torch fp32": _fp32()}, _check, flops=flops)


def _bf16(saved: str | None) -> Callable[[], float]:
    """A step of four blocks of width 512 with 1,024 tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(512) for _ in range(4)))
    mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), "bf16", saved=saved)
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(4, 256, 512, generator=generator) for _ in range(2))
    low = x.bfloat16()

    def step() -> float:
        optimizer.zero_grad()
        value = F.mse_loss(model(low).float(), target)
        value.backward()
        optimizer.step()
        return value.item()

    return step


def _compressed(saved: str) -> Workload:
    def check() -> str | None:
        got, expected = ([step() for _ in range(4)][-1] for step in (_bf16(saved), _bf16(None)))
        return verify.close(
            "loss", [torch.tensor(got)], [torch.tensor(expected)], rtol=0.01, atol=0.0
        )

    return Workload(_bf16(saved), {"as saved": _bf16(None)}, check)


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
    _workload,
)
