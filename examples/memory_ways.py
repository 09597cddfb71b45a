"""Ways to train a model in less memory: each prepares an FP32 model, and returns its optimizer.

A way imports what it needs when it is called, so that a process holds what a user's would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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


def lean(fidelity: str, **options: Any) -> Way:
    def prepare(model: nn.Module) -> torch.optim.Optimizer:
        import mixprec

        return mixprec.lean(model, fidelity=fidelity, verbose=False, **options)[1]

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


def without_logits(way: Way) -> Way:
    """`way`, and the loss of a model of transformers from its last hidden states."""

    def prepare(model: nn.Module) -> torch.optim.Optimizer:
        from mixprec.integrations.transformers import fuse_loss

        optimizer = way(model)
        fuse_loss(model)
        return optimizer

    return prepare


released = lean("balanced", release_gradients=True)
_COMMON: dict[str, Way] = {
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
    "lean balanced, `release_gradients`": released,
    "lean small": lean("small"),
    "checkpointing, mixprec bf16": checkpointed(masters),
    "checkpointing, lean balanced": checkpointed(lean("balanced")),
    "checkpointing, lean balanced, `release_gradients`": checkpointed(released),
    "checkpointing, lean small": checkpointed(lean("small")),
}
_TRANSFORMERS: dict[str, Way] = {
    "lean balanced, `fuse_loss`": without_logits(lean("balanced")),
    "checkpointing, lean balanced, `release_gradients`, `fuse_loss`": checkpointed(
        without_logits(released)
    ),
}
WAYS = {"gpt": _COMMON, "phi3": _COMMON | _TRANSFORMERS}  # of the models of peak_step.py
