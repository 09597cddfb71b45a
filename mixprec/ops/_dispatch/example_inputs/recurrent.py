"""Of recurrent layers: the sums and the state of a layer with ReLU are small integers, exact in
every format; the gates of others are 1/2 and 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .inputs import Arguments, integers

_GATES = {"lstm": 4, "gru": 3, "relu": 1}


def _cases(device: str) -> Iterator[tuple[str, int, int, torch.Tensor, torch.Tensor | None]]:
    """The cell, rows, units, the weight and batch_sizes, which those in fp16 have."""
    for units in (32, 19):
        for low in (torch.bfloat16, torch.float16):
            for cell, gates in _GATES.items():
                packed = low == torch.float16
                sizes = torch.tensor([3, 3, 1], device="cpu") if packed else None
                weight = torch.eye(gates * units, units, dtype=low, device=device)
                yield cell, 7 if packed else 6, units, weight, sizes


def _floats(device: str, cell: str, *shape: int) -> torch.Tensor:
    x = integers(device, shape, torch.float32)
    return x if cell == "relu" else torch.zeros_like(x)


def recurrent(device: str) -> Iterator[Arguments]:
    for cell, rows, units, weight, sizes in _cases(device):
        x, h = _floats(device, cell, rows, _GATES[cell] * units), _floats(device, cell, 3, units)
        c = torch.zeros_like(h) if cell == "lstm" else None
        bias = torch.zeros_like(h[0]) if cell == "gru" else None
        packed = sizes is not None
        yield [x, weight, bias, h, c, sizes, cell, packed, not packed, torch.float32]


def recurrent_backward(device: str) -> Iterator[Arguments]:
    for cell, rows, units, weight, sizes in _cases(device):
        numbers = units * (1 if cell == "relu" else 5)
        saved = torch.full((rows, numbers), 0.5, dtype=torch.float32, device=device)
        g, g_h = _floats(device, cell, rows, units), _floats(device, cell, 3, units)
        yield [g, g_h, None, weight, saved, sizes, cell, sizes is not None]
