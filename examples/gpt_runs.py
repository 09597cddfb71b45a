"""The training runs of train_gpt.py: one GPT per precision."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import gpt_data
import torch
from gpt_model import GPT, GPTConfig, Norm
from torch import nn

import mixprec
from mixprec.diagnostics.report import Row
from mixprec.lean_training import FIDELITIES
from mixprec.recipes import Recipe

BITS = 1 / math.log(2)  # a loss in nats times this is in bits
LEAN = "lean-"  # bf16 as mixprec.lean(fidelity=...) prepares it
FUSED = "fused-"  # the recipe behind it with convert(fuse=True)
AT = "@"  # the recipe before it as the GPU behind it computes it: "fp8@hopper"
FAST = "-fast"  # behind the GPU: sums stay in its short accumulator
RESEEDED = "fp32-reseeded"  # fp32 with other initial weights and data in another order
TF32 = "tf32"  # fp32, with torch's matrix products in TF32; GPUs only
VALIDATION_BYTES = 32768
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}

# convert(fuse=True) knows torch's classes; of this one of the model it has to be told.
mixprec.nn.register_fusion(
    Norm, lambda m: mixprec.nn.NormSpec(m.normalized_shape[0], m.eps, m.weight, subtract_mean=True)
)


def gpt_config(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(options.layers, options.width, options.width // 64, options.context)


def warmup_then_cosine(step: int, steps: int) -> float:
    """Learning rate factor: linear warmup over 20 steps, then cosine decay to 5 %."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine)


@contextmanager
def float32_matmul_precision(precision: str) -> Iterator[None]:
    """Set torch.set_float32_matmul_precision inside the block: "high" allows TF32 on a GPU."""
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
    finished: Callable[[mixprec.Report], None] | None = None,
    sqnr: bool = False,
) -> mixprec.Report:
    """Train one GPT per precision of options.recipes, all but RESEEDED from options.seed, on the
    same data.

    finished(report) is called after each; sqnr: as of `mixprec.compare`. A precision that fails on
    the device gets its error as status, and the others still run. Ctrl-C returns the report as it
    is.
    """
    report = mixprec.Report("tokens", "bits/byte", BITS)
    report.rows = [Row(name) for name in options.recipes]
    tf32 = report.options["tf32"] = {}
    try:
        for i, name in enumerate(options.recipes):
            gc.collect()  # free the model of a run that failed: it would count in the next peak
            try:
                with float32_matmul_precision("high" if name == TF32 else "highest"):
                    tf32[name] = torch.backends.cuda.matmul.allow_tf32
                    run = train(options, text, name, progress, sqnr)
            except RuntimeError as error:  # out of memory, or a kernel that failed
                traceback.print_exc()
                first_line = next(iter(str(error).splitlines()), "no message")
                report.rows[i].status = f"failed: {type(error).__name__}: {first_line}"
            else:
                report.rows[i] = run.rows[0]
                report.rows[i].recipe, report.rows[i].reseeded = name, name == RESEEDED
                report.environment, report.interrupted = run.environment, run.interrupted
            if finished is not None:
                finished(report)
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
    sqnr: bool,
) -> mixprec.Report:
    """Train in one precision; a report with one row."""
    config = gpt_config(options)
    evaluations = max(1, VALIDATION_BYTES // (options.batch * options.context))
    shape = options.batch, options.context

    seed = options.seed + (name == RESEEDED)
    shown, (name, _, gpu) = name, name.partition(AT)
    lean = FIDELITIES.get(name.removeprefix(LEAN)) if name.startswith(LEAN) else None
    recipe: str | Recipe
    recipe = "fp32" if name in (TF32, RESEEDED) else "bf16" if lean else name.removeprefix(FUSED)
    if gpu.endswith(FAST):
        recipe = dataclasses.replace(Recipe.parse(recipe), fast_accum=True)
    settings: dict[str, Any] = dict(ADAMW)
    if lean:  # as mixprec.lean does
        settings |= {"master_weights": lean.master_weights, "state_dtype": lean.state_dtype}

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return mixprec.optim.AdamW(list(model.parameters()), options.lr, **settings)

    def step(_: str, *where: Any) -> None:
        if progress is not None:
            progress(shown, *where)

    with mixprec.compress_saved(lean.saved, seed=seed) if lean else nullcontext():
        return mixprec.compare(
            lambda: GPT(config),
            gpt_data.Batches(text.train, *shape, options.steps, seed),
            recipe,
            validation=gpt_data.Batches(text.validation, *shape, evaluations, None),
            make_optimizer=adamw,
            fuse=name.startswith((FUSED, LEAN)),
            schedule=lambda step: warmup_then_cosine(step, options.steps),
            seed=seed,
            device=options.device,
            count=lambda batch: batch[0].numel(),
            unit="tokens",
            loss_name="bits/byte",
            loss_factor=BITS,
            progress=step,
            sqnr=sqnr,
            simulate=gpu.removesuffix(FAST) or None,
        )
