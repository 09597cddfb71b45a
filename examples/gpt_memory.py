"""The memory of a training step of the GPT, in FP32 and as mixprec.lean prepares it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gpt_data
import torch
from gpt_model import GPT
from gpt_runs import gpt_config
from torch import nn

import mixprec
from mixprec.lean import FIDELITIES


def reports(options: argparse.Namespace, text: gpt_data.Text) -> list[mixprec.MemoryReport]:
    """One per way to train, of a step with the batch size of `options`."""
    shape = options.batch, options.context
    batch = next(iter(gpt_data.Batches(text.train, *shape, 1, options.seed)))

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def masters(model: nn.Module) -> torch.optim.Optimizer:
        mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), "bf16")
        return mixprec.optim.AdamW(model.parameters())

    def lean(fidelity: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: mixprec.lean(model, fidelity=fidelity, verbose=False)[1]

    ways = {"fp32": plain, "bf16": masters, **{name: lean(name) for name in FIDELITIES}}
    found = []
    for label, prepare in ways.items():
        torch.manual_seed(options.seed)
        model = GPT(gpt_config(options)).to(options.device)
        found.append(mixprec.memory_report(model, prepare(model), batch, label=label))
    return found
