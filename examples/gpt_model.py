"""A small GPT over bytes, in PyTorch: nothing in this file chooses a precision.

What 16-bit training asks of it is FP32 where range or many small summands matter: the norms'
weights and statistics, the rotation of queries and keys, softmax, and the loss. The rotation is
mixprec's, which computes in FP32 and reads and writes the dtype of its input. Blocks hand on x and
what is to be added to it, which the next norm adds in one pass (`mixprec.nn.ResidualSequential`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import mixprec.functional
from mixprec.nn import ResidualSequential

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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention: torch's, or in 16 bits on a CPU, where that is slow, mixprec's."""
    if q.device.type == "cpu" and q.dtype != torch.float32:
        return mixprec.functional.attention(q, k, v, causal=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention of norm(x + branch), rotary positions; returns x + branch as well.

    Source: RoFormer (Su et al., 2021).
    """

    rotate = staticmethod(partial(mixprec.functional.rotary_qkv, inplace=True))  # or one like it
    attend = staticmethod(attend)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = ResidualSequential(
            Norm(config.width), nn.Linear(config.width, 3 * config.width, bias=False)
        )
        self.proj = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.heads // 2
        frequency = 1000.0 ** -(torch.arange(half) / half)
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time = x.shape[1]
        qkv, x = self.qkv(x, branch)
        q, k, v = self.rotate(qkv, self.cos[:time], self.sin[:time], heads=self.heads)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2)), x


class Block(nn.Module):
    """x + attention(x), then x + mlp(x); both begin with a norm. Takes and returns x and what is to
    be added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = ResidualSequential(
            Norm(config.width),
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        branch, x = self.attention(x, branch)
        branch, x = self.mlp(x, branch)
        return x, branch


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
        x, branch = self.embedding(tokens), None
        for block in self.blocks:
            x, branch = block(x, branch)
        logits = self.head(self.norm(x if branch is None else x + branch))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
