"""LoRA beside frozen 8-bit weights, then merged into them, with peft: ten seconds on a CPU.

A network learns a function in BF16; its weights are stored in 8 bits, and adapters learn what is
different in a second function. The lines that mixprec takes are numbered. pip install peft
"""

import argparse

import torch
from needs import needs
from torch import nn

import mixprec

argparse.ArgumentParser(description=__doc__).parse_args()  # --help
with needs("peft"):
    import peft


def network() -> nn.Sequential:
    layers = [nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4)]
    return nn.Sequential(*layers)


def batch(phase: float, size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8)
    return x.bfloat16(), (2 * x[:, :4] + x[:, 4:] + phase).sin()


def loss_of(model: nn.Module, phase: float) -> torch.Tensor:
    x, y = batch(phase)
    return (model(x).float() - y).square().mean()


def train(model: nn.Module, phase: float, steps: int) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = mixprec.optim.AdamW(params, lr=3e-3, max_grad_norm=1.0)  # 1: FP32 masters
    for _ in range(steps):
        loss_of(model, phase).backward()
        optimizer.step()
        optimizer.zero_grad()


def bytes_of(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


torch.manual_seed(0)
model = mixprec.convert(network(), "bf16")  # 2
model = mixprec.cast_parameters(model, torch.bfloat16)  # 3
train(model, phase=0.0, steps=400)
print(f"learned: loss {loss_of(model, 0.0):.3f}, on the second function {loss_of(model, 1.0):.3f}")

config = peft.LoraConfig(r=4, target_modules=["0", "2", "4"])
before = bytes_of(model)
model = peft.get_peft_model(model, config)
model, report = mixprec.freeze(model, "int8")  # 4: adapters first, then freeze
print(f"weights: {before:,} bytes, in 8 bits with adapters {bytes_of(model):,}")
train(model, phase=1.0, steps=400)
print(f"adapted: loss {loss_of(model, 1.0):.3f}")
model = model.merge_and_unload()  # decodes the weights: nn.Linear, in BF16 as before
print(f"merged: loss {loss_of(model, 1.0):.3f}, {type(model[0]).__name__}")
