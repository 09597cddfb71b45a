# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # FP8 on your own model, in ten minutes
#
# Put your model and your batches in the next cell: the rest of the page does not depend on them.
# Here it is a small transformer that predicts the next byte of Python's own source code.

# %%
import argparse
import copy
import inspect
import json
import logging

import torch

import mixprec

logging.getLogger("mixprec").setLevel("WARNING")
torch.manual_seed(0)
text = "".join(inspect.getsource(module) for module in (argparse, inspect, json, logging))
data = torch.tensor(list(text.encode()))


class Model(torch.nn.Module):
    """forward(tokens) returns the loss."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(
            128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embed = torch.nn.Embedding(256, 128)
        self.blocks = torch.nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.head = torch.nn.Linear(128, 256)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        x = self.blocks(self.embed(tokens[:, :-1]), mask=mask, is_causal=True)
        logits = self.head(x).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - 65, (16,), generator=generator)
        yield torch.stack([data[start : start + 65] for start in starts])


model = Model()

# %% [markdown]
# ## What will FP8 reach?
#
# `convert` swaps linear layers in place and says what it left out. `audit` runs one step and
# reads off what every product really had, forward and backward.

# %%
fp8 = mixprec.convert(copy.deepcopy(model), "fp8")
print(mixprec.audit(fp8, next(batches(1))))

# %% [markdown]
# ## What does each product lose?
#
# The signal-to-noise ratio of each product against FP32: *own* is that of the product by itself,
# *total* that of the whole step up to there. A layer whose *own* is far below that of the others
# deserves 16 bits.

# %%
audit = mixprec.audit(fp8, next(batches(1)), sqnr=True)
print(audit.sqnr_table())

# %% [markdown]
# ## Use it
#
# Parameters in BF16 with FP32 masters in the optimizer, the head in BF16, and a checkpoint that
# resumes bit for bit.

# %%
model = mixprec.convert(model, "fp8", overrides={"head": "bf16"})
model = mixprec.cast_parameters(model, torch.bfloat16)
optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
for step, tokens in enumerate(batches(100)):
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 or step == 99:
        print(f"step {step}: loss {loss.item():.3f}")
mixprec.save_checkpoint("run.pt", model=model, optimizer=optimizer, step=step)
