"""What a training step of the GPT keeps, in FP32 and as mixprec.lean prepares it.

    python examples/gpt_memory.py --out bench/results/cpu/lean.json

measures the GPT of 4 blocks of width 512 with 2,048 tokens a step, each way to train in a process
of its own, so that the peaks are comparable. `train_gpt.py --lean` shows the same for its model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gpt_data
import torch
from gpt_model import GPT, GPTConfig
from torch import nn

import mixprec
from mixprec.bench.environment import environment
from mixprec.lean_training import FIDELITIES

BATCH, CONTEXT = 8, 256
WAYS = ("fp32", "bf16", *FIDELITIES)


def prepared(way: str, model: nn.Module) -> torch.optim.Optimizer:
    if way == "fp32":
        return torch.optim.AdamW(model.parameters())
    if way in FIDELITIES:
        return mixprec.lean(model, fidelity=way, verbose=False)[1]
    mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), way, fuse=True)
    return mixprec.optim.AdamW(model.parameters())


def report(way: str, config: GPTConfig, batch: tuple[torch.Tensor, ...]) -> mixprec.MemoryReport:
    torch.manual_seed(0)
    model = GPT(config).to(batch[0].device)
    return mixprec.memory_report(model, prepared(way, model), batch, label=way)


def reports(config: GPTConfig, batch: tuple[torch.Tensor, ...]) -> list[mixprec.MemoryReport]:
    return [report(way, config, batch) for way in WAYS]


def in_its_own_process(way: str) -> mixprec.MemoryReport:
    text = gpt_data.standard_library()
    batch = gpt_data.Batches(text.train, BATCH, CONTEXT, 1, 0)[0]
    return report(way, GPTConfig(layers=4, width=512, heads=8, context=CONTEXT), batch)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        first, *others = pool.map(in_its_own_process, WAYS)
    print(first.table(*others))
    content = {
        "what": f"GPT of 4 blocks of width 512, {BATCH * CONTEXT:,} tokens a step",
        "command": "python examples/gpt_memory.py",
        "environment": environment(quick=False),
        "reports": [dataclasses.asdict(one) for one in (first, *others)],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
