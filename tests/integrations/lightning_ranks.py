"""A program for torchrun: FSDP2 by Lightning's ModelParallelStrategy, with our precision plugin.

torchrun --nproc-per-node 2 lightning_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import mixprec
from mixprec.integrations.lightning import MixprecPrecision

BF16 = torch.bfloat16


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.net = nn.Sequential(*blocks, nn.Linear(16, 4))
        self.norms: list[torch.Tensor] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        return self.net(x).float().square().mean()

    def configure_optimizers(self) -> Any:
        return mixprec.optim.AdamW(self.parameters(), lr=1e-2)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if optimizer.grad_norm is not None:
            self.norms.append(optimizer.grad_norm)


x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x)
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    plugins=MixprecPrecision("bf16", params=BF16),
    max_epochs=2,
    gradient_clip_val=0.1,
    default_root_dir=sys.argv[1],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
assert {p.dtype for p in module.parameters()} == {BF16}
values = mixprec.optim.fp32_state_dict(module)
assert {v.dtype for v in values.values()} == {torch.float32}
assert not all(torch.equal(v.to_local(), v.to_local().to(BF16).float()) for v in values.values())
assert module.norms[-1] < module.norms[0], "it learns to return 0"
print("FSDP2 trains", flush=True)
torch.distributed.destroy_process_group()
