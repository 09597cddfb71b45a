"""A byte-level language model in FP16 with Fabric, its loss scaled: ten seconds on a CPU.

The text is this program. The lines that mixprec takes are numbered. pip install lightning
"""

import argparse
import tempfile
from pathlib import Path

import torch
from needs import needs
from torch import nn
from torch.nn import functional

import mixprec

argparse.ArgumentParser(description=__doc__).parse_args()  # --help
with needs("lightning"):
    import lightning

    from mixprec.integrations.lightning import MixprecPrecision  # 1

CONTEXT = 16
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """CONTEXT bytes at random positions, and the byte after each."""
    at = torch.randint(len(TEXT) - CONTEXT, (size,))
    return TEXT[at[:, None] + torch.arange(CONTEXT)], TEXT[at + CONTEXT]


def setup() -> tuple[lightning.Fabric, dict]:
    """Fabric, and what belongs into a checkpoint."""
    precision = MixprecPrecision("fp16", params=torch.float16)  # 2: with a GradScaler
    fabric = lightning.Fabric(accelerator="cpu", plugins=precision)
    embed = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU()]
    model = nn.Sequential(*embed, nn.LayerNorm(128), nn.Linear(128, 256))
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)  # 3
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
    model, optimizer = fabric.setup(model, optimizer)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return fabric, {**parts, "precision": precision}


def train(fabric, model, optimizer, scheduler, precision, steps: int) -> str:
    for _ in range(steps):
        text, following = batch()
        loss = functional.cross_entropy(model(text), following)
        fabric.backward(loss)
        optimizer.step()  # unscales, clips and updates, or skips
        if not optimizer.last_step_skipped:
            scheduler.step()
        optimizer.zero_grad()
    return f"loss {loss.item():.3f}, scale {precision.scaler.get_scale():g}"


torch.manual_seed(0)
fabric, parts = setup()
print("100 steps:", train(fabric, **parts, steps=100))
with tempfile.TemporaryDirectory() as folder:
    fabric.save(folder + "/run.ckpt", parts)
    fabric, parts = setup()
    fabric.load(folder + "/run.ckpt", parts)
print("resumed, 200 steps:", train(fabric, **parts, steps=100))
