"""A small GPT over bytes, in plain PyTorch: nothing in this file knows about mixed precision.

What 16-bit training asks of it is FP32 where range or many small summands matter: the norms'
weights and statistics, softmax, and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    """`context` is the longest sequence in bytes; `width` must be a multiple of `heads`."""

    layers: int = 3
    width: int = 256
    heads: int = 4
    context: int = 128


class Norm(nn.LayerNorm):
    """LayerNorm without a bias: its weight stays FP32, its output has the dtype of its input.

    The statistics are FP32 inside the op for any input. The weight is cast because CUDA's kernel
    wants one dtype; casting the input up instead would keep an FP32 copy of it for backward.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: x [B, heads, T, d], cos and sin [T, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention of norm(x), rotary positions. Source: RoFormer (Su et al., 2021)."""

    rotate = staticmethod(rotate)  # or another function of (x, cos, sin)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Sequential(
            Norm(config.width), nn.Linear(config.width, 3 * config.width, bias=False)
        )
        self.proj = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.heads // 2
        frequency = 1000.0 ** -(torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).float().view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        cos, sin = self.cos[:time], self.sin[:time]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        # On a CPU the attention core stays FP32: torch's own fp16 attention takes 6 times as long
        # there (forward + backward of 8 x 3 x 128 x 64: 38 ms, against 6 with the casts; bf16 10).
        core = torch.float32 if x.device.type == "cpu" else x.dtype
        q, k, v = q.to(core), k.to(core), v.to(core)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, width).to(x.dtype))


class Block(nn.Module):
    """x + attention(x), then x + mlp(x); both begin with a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = nn.Sequential(
            Norm(config.width),
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class GPT(nn.Module):
    """forward(tokens [B, T], targets [B, T]) -> mean cross-entropy in nats per byte, FP32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        self.apply(self._init)
        for block in self.blocks:  # each block starts as the identity: steps count from the first
            nn.init.zeros_(block.attention.proj.weight)
            nn.init.zeros_(block.mlp[-1].weight)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
