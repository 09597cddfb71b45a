"""Models of torch.nn for tests of audit, and of what people do in models: layers that are used
twice, weights of two layers, checkpoints, hooks, functions with a backward pass of their own.

A module with products of its own says how many FLOPs they have: `by_hand(x)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.linspace(-1, 1, 2 * 6 * 16).view(2, 6, 16)
IDS = torch.arange(12).view(2, 6) % 9


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(9, 16), kind(16, 8, batch_first=True, **options)
        self.head = nn.Linear(8 * (1 + self.rnn.bidirectional), 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=2, dilation=2, padding=2),
            nn.GroupNorm(2, 8),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 9)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(src, tgt))


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Blocks(nn.Module):
    """Blocks that each run in a checkpoint. (A reentrant one has no gradients if its input has
    none.)"""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks, self.reentrant = nn.ModuleList([block(), block()]), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = x + checkpoint(each, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reused(nn.Module):
    """One layer three times, once under another name, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 16), nn.Linear(16, 16)
        self.again, self.head = self.layer, nn.Linear(16, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(ids))
        return self.head(self.again(self.layer(x).relu()))


class Product(torch.autograd.Function):
    """x @ w, whose backward pass is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, -2).t() @ g.flatten(0, -2)


class Multiplied(nn.Module):
    """A product of its own parameter, in a Function, beside one of einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.eye(16) + 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w.to(x.dtype)  # for autocast: a Function gets what the layer before returns
        return torch.einsum("bsd,de->bse", Product.apply(x, w), self.v)

    def by_hand(self, x: torch.Tensor) -> int:
        return 2 * 2 * x.numel() * 16


class Hooked(nn.Module):
    """A user's own hooks: before a layer, after it, in backward, and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.one.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.two.register_forward_hook(lambda _, args, out: out + 1)
        self.three.register_full_backward_hook(lambda _, before, after: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if x.requires_grad:
            x.register_hook(lambda g: g * 2)
        return self.three(self.two(x))


class Stacked(nn.Module):
    """Stacked weights, one product for each expert and its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(2, 1), self.weight, strict=True)
        return torch.cat([part @ w.t() for part, w in parts], 1)

    def by_hand(self, x: torch.Tensor) -> int:
        return 2 * x.numel() * 16


Case = tuple[nn.Module, dict[str, torch.Tensor]]
IMAGE = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
MODULES: dict[str, Callable[[], Case]] = {
    "Transformer": lambda: (Seq2Seq(), {"src": X, "tgt": X[:, :4]}),
    "LSTM": lambda: (Recurrent(nn.LSTM, num_layers=2), {"ids": IDS}),
    "GRU": lambda: (Recurrent(nn.GRU, bidirectional=True), {"ids": IDS}),
    "CNN": lambda: (Convolutions(), {"x": IMAGE}),
    "checkpoint": lambda: (Blocks(False), {"x": X}),
    "reentrant": lambda: (Blocks(True), {"x": X}),
    "reused and tied": lambda: (Reused(), {"ids": IDS}),
    "Function": lambda: (nn.Sequential(block(), Multiplied(), nn.Linear(16, 3)), {"input": X}),
    "hooks": lambda: (Hooked(), {"x": X}),
    "stacked": lambda: (nn.Sequential(block(), Stacked(), nn.Linear(16, 3)), {"input": X}),
}
