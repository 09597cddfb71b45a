"""Tensors that several examples are made of."""

from __future__ import annotations

import math
from typing import Any

import torch

Arguments = list[Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
SHAPES = ((144, 272), (131, 257))  # a pair of twins
AWKWARD = (0.0, -0.0, 448.0, -464.0, 6.5e4, 1e-8, math.inf, -math.inf, math.nan)


def random(device: str, seed: int = 0, shape: tuple[int, ...] = SHAPES[1]) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device)


def integers(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(shape[0])
    x = torch.randint(-4, 5, shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device, dtype)


def tensor(device: str, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def awkward(device: str) -> torch.Tensor:
    return tensor(device, AWKWARD).repeat(7)


def codes(device: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every byte in turn."""
    return torch.arange(math.prod(shape), device=device).to(torch.uint8).view(shape)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after a multiple of 16 bytes."""
    return torch.cat([x[:1], x])[1:]
