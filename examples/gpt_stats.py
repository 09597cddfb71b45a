"""What docs/stats.md shows: a Monitor of the GPT with delayed scaling.

    python examples/gpt_stats.py

writes bench/results/cpu/stats.json and the table of docs/stats.md. The text is Python's standard
library, so figures differ slightly between Python versions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gpt_data
import torch
from gpt_model import GPT, GPTConfig

import mixprec
from mixprec import stats
from mixprec.bench import report, results
from mixprec.bench.environment import environment

BATCH, CONTEXT, EVERY = 4, 128, 20
LR, RECIPE = 3e-3, "fp8-delayed"
LINES = 10  # of the table


def monitored(config: GPTConfig, batches: gpt_data.Batches) -> stats.Monitor:
    """The GPT trained with delayed scaling."""
    torch.manual_seed(0)
    model = mixprec.convert(GPT(config), RECIPE)
    mixprec.cast_parameters(model, torch.bfloat16)
    optimizer = mixprec.optim.AdamW(model.parameters(), LR, weight_decay=0.1, max_grad_norm=1.0)
    with stats.Monitor(model, every=EVERY, sqnr=True, optimizer=optimizer) as monitor:
        for batch in batches:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return monitor


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    parser.add_argument("--steps", type=int, default=320, help="with a monitor (%(default)s)")
    options = parser.parse_args(argv)
    where = environment(quick=False)
    text, config = gpt_data.standard_library().train, GPTConfig(context=CONTEXT)
    monitor = monitored(config, gpt_data.Batches(text, BATCH, CONTEXT, options.steps, 0))
    content = {
        "environment": where,
        "command": "python examples/gpt_stats.py",
        "monitor": monitor.table(LINES),
        "what": {"monitor": f"the GPT of `examples/`, {RECIPE}, {options.steps} steps"},
    }
    results.write_json(options.root / results.CPU / "stats.json", content)
    print(content["monitor"])
    for page in report.write(options.root):
        print(f"{page}: brought up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
