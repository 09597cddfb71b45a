"""The training runs of train_gpt.py, one GPT per precision, and what a GPU says while they go."""

from __future__ import annotations

import argparse
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpt_data
import torch
from gpt_model import GPT, GPTConfig
from torch import nn

import mixprec
from mixprec.bench.gpu import device
from mixprec.bench.timing.run import one_line
from mixprec.diagnostics.report import Row

BITS = 1 / math.log(2)  # a loss in nats, times this, is in bits
TF32 = "tf32"  # fp32, with torch's products in TF32: only GPUs have it
VALIDATION_BYTES = 32768
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}


def gpt_config(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(options.layers, options.width, options.width // 64, options.context)


def warmup_then_cosine(step: int, steps: int) -> float:
    """The learning rate's factor: up over the first 20 steps, then down to 5 % on half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine)


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """How torch computes FP32 products inside: "highest" is FP32, "high" is TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compare(
    options: argparse.Namespace,
    text: gpt_data.Text,
    progress: Callable[[str, int, int | None, float], None] | None = None,
    finished: Callable[[mixprec.Report, str], None] | None = None,
) -> mixprec.Report:
    """One GPT per precision of options.recipes, all from options.seed, on the same data.

    finished(report, precision) is called after each; what failed on the device is a row that says
    so.
    """
    report = mixprec.Report("tokens", "bits/byte", BITS)
    report.rows = [Row(name) for name in options.recipes]
    tf32: dict[str, bool] = {}
    try:
        for i, name in enumerate(options.recipes):
            gc.collect()  # the model of a run that failed would be in the next one's peak memory
            try:
                with fp32_products("high" if name == TF32 else "highest"):
                    tf32[name] = torch.backends.cuda.matmul.allow_tf32
                    part = train(options, text, name, progress)
            except RuntimeError as error:  # out of memory, a kernel that fails
                traceback.print_exc()
                report.rows[i].status = f"failed: {one_line(error)}"
            else:
                report.rows[i] = part.rows[0]
                report.rows[i].recipe = name
                report.environment, report.interrupted = part.environment, part.interrupted
            report.options = {"tf32": tf32}
            if finished is not None:
                finished(report, name)
            if report.interrupted:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def train(
    options: argparse.Namespace,
    text: gpt_data.Text,
    name: str,
    progress: Callable[[str, int, int | None, float], None] | None,
) -> mixprec.Report:
    """The run of one precision."""
    config = gpt_config(options)
    evaluations = max(1, VALIDATION_BYTES // (options.batch * options.context))
    shape = options.batch, options.context

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return mixprec.optim.AdamW(params, options.lr, **ADAMW)

    def step(recipe: str, *where: Any) -> None:
        if progress is not None:
            progress(name, *where)

    return mixprec.compare(
        lambda: GPT(config),
        gpt_data.Batches(text.train, *shape, options.steps, options.seed),
        "fp32" if name == TF32 else name,
        validation=gpt_data.Batches(text.validation, *shape, evaluations, None),
        make_optimizer=adamw,
        schedule=lambda step: warmup_then_cosine(step, options.steps),
        seed=options.seed,
        device=options.device,
        count=lambda batch: batch[0].numel(),
        unit="tokens",
        loss_name="bits/byte",
        loss_factor=BITS,
        progress=step,
    )


class GpuRecord:
    """The facts about a GPU that its figures need beside them, for report.environment."""

    def __init__(self) -> None:
        self.watch = device.Watch()
        self.watched: dict[str, dict[str, list[float]]] = {}
        self.before = device.snapshot()

    def finished(self, recipe: str) -> None:
        """This precision ran since the last call."""
        self.watched[recipe] = self.watch.since_last()

    def facts(self) -> dict[str, Any]:
        return {
            **device.properties(),
            "gpu_before": self.before,
            "gpu_after": device.snapshot(),
            "watched": self.watched,
        }

    def close(self) -> None:
        self.watch.close()
