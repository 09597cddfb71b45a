# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Why did my run diverge?
#
# A run that is fine in FP32 and not in 16 bits. The cause is planted, as such causes are met: one
# layer whose activations grow, in a model whose author did not expect it.

# %%
import logging

import torch

import mixprec

logging.getLogger("mixprec").setLevel("WARNING")


class Block(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.gain = gain

    def forward(self, x):
        hidden = self.gain * torch.relu(self.up(self.norm(x))) ** 2
        return x + self.down(hidden) / self.gain


def make_model():
    torch.manual_seed(0)
    gains = (1.0, 1.0, 20_000.0, 1.0)
    return torch.nn.Sequential(*map(Block, gains), torch.nn.Linear(64, 8))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 64, generator=generator)
    return x, x[:, :8].sin()


def loss_of(model, x, target):
    return (model(x).float() - target).square().mean()


def train(model, steps=60):
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = mixprec.GradScaler(model=model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scaler, optimizer


losses, *_ = train(make_model())
print(f"fp32: {losses[0]:.3f} to {losses[-1]:.3f}")
fp16 = mixprec.convert(make_model(), "fp16")
losses, scaler, optimizer = train(fp16)
print(f"fp16: {losses[0]:.3f} to {losses[-1]:.3f}, {scaler.skipped.item()} of 60 steps skipped")

# %% [markdown]
# Every step was skipped: the scaler did its work, nothing in the model has changed, and the scale
# went down for nothing. The question is where the first Inf or NaN came from.

# %%
print(*scaler.overflow_report(fp16)[:4], sep="\n")

# %% [markdown]
# NaN in whole gradients, of the first block too: then the loss itself is not finite, and the
# forward pass is to blame. `audit` runs one step, changes nothing, and puts what it finds first.

# %%
x, target = batch(0)
audit = mixprec.audit(fp16, x, loss=lambda y: (y.float() - target).square().mean(), sqnr=True)
print(*audit.findings, sep="\n")

# %% [markdown]
# The third block, its second layer: a few of its inputs exceed 65,504, the largest number of
# FP16, and one is enough. `bisect` says the same from the other side: it runs the model in FP32
# and in FP16 on one batch and names the first op where they diverge by more than the formats
# explain.

# %%
diff = mixprec.bisect(
    make_model(), mixprec.convert(make_model(), "fp16"), x, loss=lambda y: y.float().square().mean()
)
print(diff)

# %% [markdown]
# What to do about it: BF16 has the range of FP32. One layer is enough.

# %%
mended = mixprec.convert(make_model(), "fp16", overrides={"2.down": "bf16"})
losses, scaler, _ = train(mended)
print(f"mended: {losses[0]:.3f} to {losses[-1]:.3f}, {scaler.skipped.item()} steps skipped")

# %% [markdown]
# And before the next run: `scaler = mixprec.GradScaler(max_consecutive_skips=50)` ends a run that
# only skips with an error that names the worst parameter, and `mixprec.stats.Monitor(model)`
# records what every cast loses while the run goes on.
