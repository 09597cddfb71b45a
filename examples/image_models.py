"""A small CNN and a small ViT, in plain PyTorch: nothing here knows about mixed precision.

Both take images [N, 1, side, side] and return logits [N, classes] in the images' dtype. What
16-bit training asks of them is FP32 where many small summands matter: the norms' weights and
statistics, softmax, and, outside, the loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt_model import Norm
from torch import nn


class Residual(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), at half the resolution.

    The shortcut is a 1x1 convolution with the same stride. Source: Deep Residual Learning for Image
    Recognition (He et al., 2015).
    """

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class CNN(nn.Module):
    """A convolution, two residual blocks that halve the resolution, the mean over it, a head."""

    def __init__(self, classes: int, side: int, channels: int = 20) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2 if side > 16 else 1, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(
            Residual(channels, 2 * channels), Residual(2 * channels, 4 * channels)
        )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(x.mean(dim=(2, 3)))


class Attention(nn.Module):
    """Self-attention of all patches with all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, patches, width = x.shape
        qkv = self.qkv(x).view(n, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if x.device.type == "cpu":  # torch's 16-bit attention is slow there (see gpt_model.py)
            q, k, v = q.float(), k.float(), v.float()
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(n, patches, width).to(x.dtype))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = Norm(width)
        self.attention = Attention(width, heads)
        self.norm2 = Norm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """4 x 4 patches, each a linear embedding; blocks; the mean over the patches; a head.

    Source: An Image is Worth 16x16 Words (Dosovitskiy et al., 2020).
    """

    def __init__(
        self, classes: int, side: int, width: int = 64, layers: int = 3, heads: int = 2
    ) -> None:
        super().__init__()
        self.patch = side // 4
        self.embedding = nn.Linear(self.patch**2, width)
        self.position = nn.Parameter(0.3 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = Norm(width)
        self.head = nn.Linear(width, classes)
        for block in self.blocks:  # each block starts as the identity: steps count from the first
            nn.init.zeros_(block.attention.proj.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        x = self.blocks(self.embedding(patches) + self.position)
        return self.head(self.norm(x).mean(dim=1))


MODELS = {"cnn": CNN, "vit": ViT}
