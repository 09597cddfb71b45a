"""Ways to train a model in less memory: each prepares an FP32 model, and returns its optimizer.

A way imports what it needs when it is called, so that a process holds what a user's would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Way = Callable[[nn.Module], torch.optim.Optimizer]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def autocast(model: nn.Module) -> torch.optim.Optimizer:
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return plain(model)


def torchao_8bit(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters())


def torchao_8bit_bf16(model: nn.Module) -> torch.optim.Optimizer:
    """Without masters: stochastic rounding keeps what updates below half a step of BF16 change."""
    from torchao.optim import AdamW8bit

    model.bfloat16()
    return AdamW8bit(model.parameters(), bf16_stochastic_round=True)


def bitsandbytes_8bit(model: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters())


def masters(model: nn.Module) -> torch.optim.Optimizer:
    import mixprec

    mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), "bf16", fuse=True)
    return mixprec.optim.AdamW(model.parameters())


def lean(fidelity: str) -> Way:
    def prepare(model: nn.Module) -> torch.optim.Optimizer:
        import mixprec

        return mixprec.lean(model, fidelity=fidelity, verbose=False)[1]

    return prepare


def checkpointed(way: Way) -> Way:
    """`way`, and each block keeps its input alone, from which backward computes it again."""

    def prepare(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = way(model)
        if hasattr(model, "gradient_checkpointing_enable"):  # of transformers
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in getattr(model, "blocks", ()):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return optimizer

    return prepare


WAYS: dict[str, Way] = {
    "FP32": plain,
    "`torch.autocast`, bf16": autocast,
    "checkpointing": checkpointed(plain),
    "torchao `AdamW8bit`": torchao_8bit,
    "torchao `AdamW8bit`, BF16 model": torchao_8bit_bf16,
    "bitsandbytes `AdamW8bit`": bitsandbytes_8bit,
    "checkpointing, torchao `AdamW8bit`": checkpointed(torchao_8bit),
    "mixprec bf16": masters,
    "lean high": lean("high"),
    "lean balanced": lean("balanced"),
    "lean small": lean("small"),
    "checkpointing, mixprec bf16": checkpointed(masters),
    "checkpointing, lean balanced": checkpointed(lean("balanced")),
    "checkpointing, lean small": checkpointed(lean("small")),
}
