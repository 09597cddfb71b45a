"""A layer of Llama-3-8B on the GPU, forward and backward: what all kernels together give a user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import mixprec

from .. import device, verify
from .registry import Workload, both_passes, case, times_faster


class Sizes(NamedTuple):
    tokens: int = 8192
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8


TINY = Sizes(64, 64, 96, 4, 2)


def _sizes() -> Sizes:
    return TINY if device.DRY_RUN else Sizes()


# Against the layer in bf16: the output has the residual stream in it, which no cast touches.
OUTPUT_DB, GRADIENT_DB = 20.0, 14.0
OVER_BF16 = 1.3


class LlamaLayer(nn.Module):
    """Attention with grouped heads and rotary positions, and a gated MLP, each after a norm."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        tokens, width, hidden, heads, kv_heads = sizes
        self.head = width // heads
        self.split = [n * self.head for n in (heads, kv_heads, kv_heads)]
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.split), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        turns = 500000.0 ** -(torch.arange(0, self.head, 2) / self.head)
        angles = torch.arange(tokens)[:, None] * turns
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head] turned by its position, pair by pair."""
        one, two = x.chunk(2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).split(self.split, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)) for t in parts)
        q, k, v = (t.transpose(0, 1)[None] for t in (self.rotated(q), self.rotated(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed[0].transpose(0, 1).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def _layer() -> LlamaLayer:
    """In bf16 on the device, always with the same weights."""
    torch.manual_seed(0)
    return LlamaLayer(_sizes()).to(device.DEVICE, torch.bfloat16)


Pass = Callable[[], tuple[torch.Tensor, ...]]


def _pass(layer: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Pass:
    """Forward and backward; gives y, the gradient of x and that of each weight."""
    tokens, width, *_ = _sizes()
    x = device.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    g = device.randn(tokens, width, dtype=torch.bfloat16, seed=1)
    leaves = [x, *layer.parameters()]
    return lambda: both_passes(lambda: forward(x), leaves, g)


def _bf16() -> dict[str, Pass]:
    eager, compiled = _layer(), _layer()
    return {
        "torch bf16": _pass(eager, eager),
        "torch bf16, compiled": _pass(compiled, device.compiled(compiled)),
    }


def _workload(recipe: str, compiled: bool) -> Workload:
    plain, (tokens, width, *_) = _layer(), _sizes()
    weights = sum(p.numel() for p in plain.parameters())
    attention = 2.0 * tokens * tokens * width  # QK^T and PV, of which causality needs half

    def ours() -> Pass:
        layer = mixprec.convert(_layer(), recipe)
        return _pass(layer, device.compiled(layer) if compiled else layer)

    def check() -> str | None:
        names = ["grad of x", *(f"grad of {name}" for name, _ in plain.named_parameters())]
        bars = {"y": OUTPUT_DB, **dict.fromkeys(names, GRADIENT_DB)}
        return verify.sqnr_at_least(bars, ours()(), _pass(plain, plain)())

    flops = 3 * (2.0 * tokens * weights + attention)
    return Workload(ours(), _bf16(), check, bytes=2.0 * weights, flops=flops)


_WHAT = f"a layer of Llama-3-8B, {Sizes().tokens} tokens, forward + backward"
for _recipe in ("bf16", "fp8", "fp8-rowwise", "fp8-block"):
    for _compiled in (False, True):
        _how = "compiled" if _compiled else "eager"
        case(
            f"cuda/layer/{_recipe}/{_how}",
            f"{_WHAT}: {_recipe}, {_how}, against bf16",
            times_faster(OVER_BF16 if "fp8" in _recipe else 1.0),
            partial(_workload, _recipe, _compiled),
            quick=_recipe in ("fp8", "fp8-block"),
        )
