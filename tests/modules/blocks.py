"""Models with parts that convert(fuse=True) knows, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mixprec

WIDTH, HIDDEN, ROWS = 48, 160, 70


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, 3, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


def feed_forward(norm: nn.Module | None = None, hidden: int = HIDDEN) -> nn.Sequential:
    norm = nn.LayerNorm(WIDTH) if norm is None else norm
    return nn.Sequential(norm, nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    return model, torch.randn(2, ROWS, WIDTH)


def converted(model: nn.Module, recipe: Any = "bf16") -> tuple[Any, Any]:
    """A copy of the model that is not fused, and the model, which is."""
    plain = mixprec.convert(copy.deepcopy(model), recipe)
    return plain, mixprec.convert(model, recipe, fuse=True)


def gradients(
    model: nn.Module, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The output, of `run` or the model, and the gradients of its mean square: of x and of the
    parameters. Delayed scales are updated."""
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mixprec.update_scales(model)
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
