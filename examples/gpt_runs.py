"""The training runs of train_gpt.py: one GPT per precision."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import gpt_data
import torch
from gpt_model import GPT, GPTConfig, Norm
from gpt_report import BITS, Report, Row
from torch import nn

import mixprec
from mixprec.diagnostics.audit.records import ROLES_OF, Lost
from mixprec.lean_training import FIDELITIES
from mixprec.recipes import OUTLIERS, Recipe

LINES = 8  # of progress, for each precision
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


def progress(row: Row, options: argparse.Namespace) -> None:
    """Print a line after some of the steps."""
    step = len(row.losses)
    if step in (1, options.steps) or step % max(1, options.steps // LINES) == 0:
        # The time of the first step, which warms up, is not in the speed.
        seconds = sum(row.seconds[1:])
        speed = f"{(step - 1) * row.tokens / seconds:6,.0f} bytes/s" if step > 1 else ""
        line = f"{row.recipe:>5}  step {step:5d}/{options.steps}  {row.losses[-1] * BITS:6.3f}"
        print(f"{line} bits/byte  {speed}".rstrip(), flush=True)


def compare(
    options: argparse.Namespace,
    text: gpt_data.Text,
    after_step: Callable[[Row, argparse.Namespace], None] | None = None,
    finished: Callable[[Report], None] | None = None,
    sqnr: bool = False,
) -> Report:
    """Train one GPT per precision of options.recipes, all but RESEEDED from options.seed, on the
    same data.

    finished(report) is called after each; sqnr: measure what its products lose. A precision that
    fails on the device gets its error as status, and the others still run. Ctrl-C returns the
    report as it is.
    """
    report = Report(
        [Row(name, options.batch * options.context, name == RESEEDED) for name in options.recipes]
    )
    tf32, before = report.options.setdefault("tf32", {}), torch.get_float32_matmul_precision()
    try:
        for row in report.rows:
            gc.collect()  # free the model of a run that failed: it would count in the next peak
            torch.set_float32_matmul_precision("high" if row.recipe == TF32 else "highest")
            tf32[row.recipe] = torch.backends.cuda.matmul.allow_tf32
            try:
                train(options, text, row, after_step, sqnr)
            except RuntimeError as error:  # out of memory, or a kernel that failed
                traceback.print_exc()
                first_line = next(iter(str(error).splitlines()), "no message")
                row.status = f"failed: {type(error).__name__}: {first_line}"
            if finished is not None:
                finished(report)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        torch.set_float32_matmul_precision(before)
    return report


def train(
    options: argparse.Namespace,
    text: gpt_data.Text,
    row: Row,
    after_step: Callable[[Row, argparse.Namespace], None] | None,
    sqnr: bool,
) -> None:
    """Train in the precision of the row, which gets the measurements; then audit a step."""
    seed, shape = options.seed + row.reseeded, (options.batch, options.context)
    name, _, gpu = row.recipe.partition(AT)
    lean = FIDELITIES.get(name.removeprefix(LEAN)) if name.startswith(LEAN) else None
    recipe = None
    if name not in ("fp32", TF32, RESEEDED):
        recipe = Recipe.parse("bf16" if lean else name.removeprefix(FUSED))
        recipe = dataclasses.replace(recipe, fast_accum=gpu.endswith(FAST))
    settings: dict[str, Any] = dict(ADAMW)
    if lean:  # as mixprec.lean does
        settings |= {"master_weights": lean.master_weights, "state_dtype": lean.state_dtype}
    saved = mixprec.compress_saved(lean.saved, seed=seed) if lean else nullcontext()

    def batches(data: torch.Tensor, count: int, seed: int | None) -> Iterator[list[torch.Tensor]]:
        for batch in gpt_data.Batches(data, *shape, count, seed):
            yield [t.to(options.device) for t in batch]

    with saved, mixprec.simulate(gpu.removesuffix(FAST)) if gpu else nullcontext():
        torch.manual_seed(seed)
        model, fp16 = GPT(gpt_config(options)).to(options.device), False
        if recipe is not None:
            mixprec.convert(model, recipe, fuse=name.startswith((FUSED, LEAN)))
            fp16 = recipe.needs_loss_scaling
            mixprec.cast_parameters(model, torch.float16 if fp16 else torch.bfloat16)
            if recipe.outliers:
                mixprec.choose_outliers(model, batches(text.train, options.steps, seed))
        optimizer = mixprec.optim.AdamW(list(model.parameters()), options.lr, **settings)
        scaler = mixprec.GradScaler(torch.device(options.device).type, enabled=fp16)
        on_gpu = options.device.startswith("cuda")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(options.device)
        for step, batch in enumerate(batches(text.train, options.steps, seed)):
            row.status = f"interrupted in step {step + 1}"  # until the step is over
            row.data = zlib.crc32(bytes(batch[0].flatten().tolist()), row.data)
            optimizer.param_groups[0]["lr"] = options.lr * warmup_then_cosine(step, options.steps)
            start = time.perf_counter()
            loss = model(*batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            row.losses.append(loss.item())  # waits for a GPU
            row.seconds.append(time.perf_counter() - start)
            if after_step is not None:
                after_step(row, options)
        row.status = "interrupted after training"
        row.skipped_steps = int(optimizer.skipped)
        row.loss_scale = scaler.get_scale() if fp16 else None
        peak = {"peak": torch.cuda.max_memory_allocated(options.device)} if on_gpu else {}
        evaluations = max(1, VALIDATION_BYTES // row.tokens)
        model.eval()
        with torch.no_grad():
            losses = [model(*b).item() for b in batches(text.validation, evaluations, None)]
        row.validation_loss = math.fsum(losses) / evaluations
        model.train()
        kept = mixprec.memory_report(model, optimizer, batch)
        row.bytes = {
            "params": kept.parameters,
            "grads": kept.gradients,
            "optim": sum(kept.states.values()),
            "saved": kept.saved_total,
            **peak,
        }
        found = mixprec.audit(model, *batch, sqnr=sqnr)
        row.audit = [found.summary(), *found.findings]
        decided = "tensor dtype" if recipe is None else f"recipe {recipe.name}"
        row.wrong = list(wrong_products(found, model, decided))
        row.sqnr = sqnrs(found) if sqnr else {}
    row.status = "complete"


def wrong_products(found: mixprec.Audit, model: nn.Module, decided: str) -> Iterator[str]:
    """A sentence for each linear layer of a block whose three products were not set by this."""
    for name, module in model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            ops = [op for op in found.ops if op.module == name and op.kind == "product"]
            ops = [op for op in ops if op.decided != f"recipe {OUTLIERS.name}"]  # beside the others
            got = {op.decided for op in ops}
            if got != {decided} or sum(op.calls for op in ops) != len(ROLES_OF):
                seen = ", ".join(f"{op.calls} x ({op.decided})" for op in ops) or "nothing"
                yield f"{name} should have run three products by {decided}, but ran {seen}"


def sqnrs(found: mixprec.Audit) -> dict[str, dict[str, float | None]]:
    """In dB, by layer and product."""
    lost: dict[str, dict[str, Lost]] = {}
    for op in found.ops:
        if op.module is not None and op.decided.startswith("recipe"):
            for product in op.lost.keys() & ROLES_OF.keys():
                layer = lost.setdefault(op.module, {})
                layer.setdefault(product, Lost()).add(op.lost[product])
    return {layer: {p: one.own for p, one in of.items()} for layer, of in lost.items()}
