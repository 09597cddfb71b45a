"""A classifier in FP8 with Lightning's Trainer, resumed from its checkpoint: ten seconds on a CPU.

The lines that mixprec takes are numbered. pip install lightning
"""

import argparse
import math
import tempfile

import torch
from needs import needs
from torch import nn
from torch.nn import functional

import mixprec

argparse.ArgumentParser(description=__doc__).parse_args()  # --help
with needs("lightning"):
    import lightning

    from mixprec.integrations.lightning import MixprecPrecision  # 1


def spirals(count: int = 2048) -> torch.utils.data.TensorDataset:
    """Points on three spiral arms, as 32 waves of their coordinates, and the number of the arm."""
    arm, radius = torch.arange(count) % 3, torch.rand(count)
    angle = 4 * radius + arm * 2 * math.pi / 3 + 0.1 * torch.randn(count)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    waves = (points[..., None] * torch.arange(16)).flatten(1).sin()
    return torch.utils.data.TensorDataset(waves, arm)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(32, 128), nn.Linear(128, 3)
        self.net = nn.Sequential(first, nn.LayerNorm(128), nn.GELU(), last)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return mixprec.optim.AdamW(self.parameters(), lr=3e-3)  # 2


def fit(epochs: int, path: str, resume: str | None = None) -> float:
    """Train up to `epochs`, save the checkpoint `path`, and return the loss of the last epoch."""
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=MixprecPrecision("fp8-delayed", params=torch.bfloat16),  # 3
        gradient_clip_val=1.0,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(DATA, 64, shuffle=True), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return trainer.callback_metrics["loss"].item()


torch.manual_seed(0)
DATA = spirals()
with tempfile.TemporaryDirectory() as folder:
    print(f"loss after 4 epochs: {fit(4, folder + '/4.ckpt'):.3f}")
    print(f"resumed, after 8: {fit(8, folder + '/8.ckpt', resume=folder + '/4.ckpt'):.3f}")
