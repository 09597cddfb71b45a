"""A small task that can be learned, for the tests of compare()."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

RECIPES = ("fp32", "bf16", "fp16", "fp8")
K, HIDDEN, CLASSES, SAMPLES, STEPS = 16, 32, 4, 24, 20


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        return F.cross_entropy(self.head(F.relu(self.second(self.norm(x)))).float(), y)


def data(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A task that can be learned: the class is the largest of the first numbers."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, SAMPLES, K, generator=generator)
    return [(x, x[:, :CLASSES].argmax(1)) for x in xs]
