"""Where the time of a training step of the GPT goes, op by op."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from . import pages, results
from .cases import gpt
from .environment import environment
from .table import markdown

STEPS = 10
PARTS = {  # by what an op's name holds, the first that fits
    "matrix products": ("gemm", "::mm", "::addmm", "::bmm"),
    "attention": ("attention",),
    "norms, activations, rotary": ("norm", "act_", "rotary", "gelu"),
    "optimizer, gradient norms": ("adamw", "grad_stats", "step", "foreach", "clip"),
    "casts, copies, sums, losses": ("aten::",),
}
PYTHON = "Python, autograd, allocation"


def measure(size: str, recipe: str) -> dict[str, float]:
    """Milliseconds a step by part, each op without those that it calls."""
    step = gpt.ours(partial(gpt.gpt, size), recipe, fuse=True)
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for _ in range(STEPS):
            with torch.profiler.record_function("everything"):
                step()
    times = dict.fromkeys([*PARTS, PYTHON], 0.0)
    for event in run.key_averages():
        fits = (part for part, words in PARTS.items() if any(w in event.key for w in words))
        times[next(fits, PYTHON)] += event.self_cpu_time_total / 1e3 / STEPS
    return times


def write(root: Path) -> str:
    """Measure, write the result; return the table."""
    content = {
        "environment": environment(quick=False),
        "sizes": {size: measure(size, "bf16") for size in gpt.SIZES},
    }
    results.write_json(root / results.CPU / "profile.json", content)
    return block(content)


def block(content: dict[str, Any]) -> str:
    sizes = content["sizes"]
    body = []
    for part in [*PARTS, PYTHON]:
        cells = []
        for times in sizes.values():
            whole = sum(times.values())
            cells.append(f"{times[part]:.1f} ms ({times[part] / whole:.0%})")
        body.append((part, *cells))
    shown = markdown(("part of a step", *(f"GPT {size}" for size in sizes)), body)
    return f"{shown}\n\n{pages.machine(content['environment'])}"
