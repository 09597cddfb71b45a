"""Train one small GPT in FP32, BF16, FP16 and FP8 and compare: `make demo` runs this.

    python examples/train_gpt.py [--text FILE] [--full] [--device cuda] [--out DIR] ...

The text is the source code of the Python standard library, or a file of your own. At the end it
prints a table and writes DIR/results.json and DIR/loss.png. The exit code is 0 only if every layer
of every block ran all its matrix products in its recipe's format, each validation loss is within
2 % of FP32's, and each model learned clearly more than the frequencies of single bytes. With fewer
steps than the default, losses only have to be finite.

After the table, a line for each precision says which precision the products of one more step really
had (`mixprec.audit`). fp32-reseeded is FP32 from another seed: a difference smaller than its own to
fp32 is within run-to-run noise.

With --lean it trains in FP32 and in the ways of `mixprec.lean`, and shows the bytes of a step.

On a GPU the FP32 baseline is trained twice: as fp32, with torch's FP32 matrix products in full
precision, and as tf32; TF32 is off in every other run. results.json is rewritten after each
precision. A precision that fails is reported, and the others still run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpt_data
import torch
from gpt_memory import reports
from gpt_model import GPT
from gpt_report import BITS, Report
from gpt_runs import (
    ADAMW,
    AT,
    FAST,
    FUSED,
    LEAN,
    RESEEDED,
    TF32,
    compare,
    gpt_config,
    progress,
)
from plot_losses import plot_losses

import mixprec
import mixprec.env
from mixprec.bench import device
from mixprec.bench.environment import environment
from mixprec.lean_training import FIDELITIES

MAX_DIFFERENCE = 0.02  # to FP32's validation loss
GAIN, FULL_GAIN = 0.25, 0.33  # how far below the text's unigram entropy each run must come
STEPS, FULL_STEPS = 320, 1000
RECIPES = f"fp32,bf16,fp16,fp8,{RESEEDED}"
GPU_RECIPES = "fp32,tf32,bf16,fp16,fp8"
LEAN_RECIPES = ",".join(["fp32", *(LEAN + fidelity for fidelity in FIDELITIES)])


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one small GPT in several precisions and compare them."
    )

    def add(name: str, help: str, **settings: Any) -> None:
        default = f" (default: {settings['default']})" if "default" in settings else ""
        parser.add_argument(name, help=help + default, **settings)

    add("--text", "train on this file (default: Python's standard library)", metavar="FILE")
    add("--full", f"{FULL_STEPS} steps instead of {STEPS}", action="store_true")
    add("--steps", "training steps per precision (default: as --full says)", type=int)
    recipes = f"precisions, separated by commas, also {FUSED}fp8, fp8{AT}hopper and so on "
    recipes += f"(default: {RECIPES}; on a GPU {GPU_RECIPES})"
    add("--recipes", recipes, metavar="A,B")
    lean = f"train {LEAN_RECIPES} and show the memory of a step"
    add("--lean", lean, action="store_true")
    add("--device", "cpu or cuda", default="cpu")
    add("--out", "folder for results.json and loss.png", default="demo", metavar="DIR")
    add("--seed", "seed of the weights and of the order of the data", type=int, default=0)
    add("--lr", "highest learning rate", type=float, default=3e-3)
    add("--batch", "sequences per step", type=int, default=4)
    add("--context", "bytes per sequence", type=int, default=128)
    add("--layers", "transformer blocks", type=int, default=3)
    add("--width", "size of the residual stream, a multiple of 64", type=int, default=256)
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = FULL_STEPS if options.full else STEPS
    for name in ("steps", "batch", "context", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.width % 64:
        parser.error(f"--width must be a multiple of 64, got {options.width}")
    on_gpu = options.device.startswith("cuda")
    default = LEAN_RECIPES if options.lean else GPU_RECIPES if on_gpu else RECIPES
    options.recipes = (options.recipes or default).split(",")
    for i, name in enumerate(options.recipes):
        if name == TF32 and not on_gpu:
            parser.error(f"--recipes: {TF32} needs --device cuda")
        if name not in ("fp32", TF32, RESEEDED, *LEAN_RECIPES.split(",")):
            try:
                given = name.removeprefix(FUSED).partition(AT)[0]
                options.recipes[i] = name.replace(given, mixprec.Recipe.parse(given).name, 1)
                if AT in name:
                    mixprec.simulate(name.partition(AT)[2].removesuffix(FAST))
            except ValueError as error:
                parser.error(f"--recipes: {error}; fp32 is a choice here too")
    return options


def check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        sys.exit(f"error: --device must be cpu or cuda, got {name}")
    if kind == "cuda" and not torch.cuda.is_available():
        reason = mixprec.env.machine()["gpu_reason"]
        sys.exit(f"error: --device {name}: there is no GPU to use ({reason})")


def problems(report: Report, unigram: float, gain: float | None) -> list[str]:
    """The conditions that a complete comparison does not meet, one sentence each. gain: None after
    too few steps to judge what was learned."""
    found = [f"{row.recipe} {row.status}" for row in report.rows if row.status != "complete"]
    complete = [row for row in report.rows if row.status == "complete"]
    found += [f"{row.recipe}: {wrong}" for row in complete for wrong in row.wrong]
    of_seed = [row for row in complete if not row.reseeded]
    found += [
        f"{row.recipe} was trained on other data" for row in of_seed if row.data != of_seed[0].data
    ]
    for row in report.rows:
        if row.validation_loss is None:
            continue
        bits = row.validation_loss * BITS
        difference = report.difference(row)
        if not math.isfinite(bits):
            found.append(f"{row.recipe} has no finite validation loss")
            continue
        if gain is None:
            continue
        if difference is not None and abs(difference) > MAX_DIFFERENCE and not row.reseeded:
            found.append(
                f"{row.recipe} is {difference:+.2%} from fp32, more than {MAX_DIFFERENCE:.0%}"
            )
        if bits > unigram * (1 - gain):
            found.append(
                f"{row.recipe} reached {bits:.3f} bits per byte, which is not {gain:.0%} below "
                f"the {unigram:.3f} of single bytes"
            )
    return found


def run(options: argparse.Namespace) -> int:
    text = gpt_data.load(options.text, options.context)
    unigram = text.unigram_entropy()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)  # fail before the training, not after

    with torch.device("meta"):  # shapes only
        size = sum(p.numel() for p in GPT(gpt_config(options)).parameters())
    tokens = options.batch * options.context
    print(
        f"GPT of {size / 1e6:.2f} million parameters on {text.train.numel() / 1e6:.2f} MB of text "
        f"({text.source}), unigram entropy {unigram:.3f} bits per byte\n"
        f"{options.steps} steps of {tokens} bytes per precision on {options.device}, "
        f"{torch.get_num_threads()} threads",
        flush=True,
    )
    machine = environment(quick=False)
    if options.device.startswith("cuda"):
        machine |= device.properties()

    def describe(report: Report, problems: list[str]) -> None:
        report.options |= vars(options) | ADAMW | {"parameters": size}
        report.environment |= {
            **machine,
            "text": text.source,
            "text_bytes": {"train": text.train.numel(), "validation": text.validation.numel()},
            "unigram_bits_per_byte": unigram,
            "problems": problems,
        }

    def finished(report: Report) -> None:
        describe(report, ["not complete: the program ended before the last precision"])
        with suppress(OSError):  # reported at the end
            report.save(out / "results.json")

    report = compare(options, text, progress, finished)

    gain = None if options.steps < STEPS else FULL_GAIN if options.full else GAIN
    found = [] if report.interrupted else problems(report, unigram, gain)
    describe(report, found)
    print(f"\n{report}\n", flush=True)
    for row in report.rows:
        if row.audit:
            print(f"audit of {row.recipe}: ", end="")
            print(*row.audit, sep="\n  ", flush=True)
    curves = {row.recipe: [BITS * x for x in row.losses] for row in report.rows if row.losses}
    held_out = {r.recipe: BITS * r.validation_loss for r in report.rows if r.validation_loss}
    files: list[tuple[Path, Callable[[Path], None]]] = [
        (out / "results.json", report.save),
        (out / "loss.png", lambda path: plot_losses(path, curves, held_out, "bits/byte", RESEEDED)),
    ]
    if options.lean and not report.interrupted:
        batch = gpt_data.Batches(text.train, options.batch, options.context, 1, options.seed)[0]
        batch = tuple(t.to(options.device) for t in batch)
        first, *others = reports(gpt_config(options), batch)
        print(f"{first.table(*others)}\n", flush=True)
    for path, write in files:
        try:
            write(path)
        except OSError as error:
            print(f"error: cannot write {path}: {error.strerror or error}", file=sys.stderr)
            return 1
        except ImportError as error:  # without matplotlib there is no picture
            print(f"no {path}: {error}", file=sys.stderr)
        else:
            print(f"wrote {path}")
    if report.interrupted:
        print("interrupted: the table and the files hold the results so far")
        return 130
    for problem in found:
        print(f"failed: {problem}", file=sys.stderr)
    if not found:
        learned = f"losses are judged after {STEPS} steps or more"
        if gain is not None:
            worst = max(row.validation_loss or 0.0 for row in report.rows)
            learned = f"each precision is within {MAX_DIFFERENCE:.0%} of fp32 and at least "
            learned += f"{1 - worst * BITS / unigram:.0%} below the unigram entropy"
        print(f"passed: every matrix product of every block ran in its recipe's format; {learned}")
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    check_device(options.device)
    try:
        return run(options)
    except gpt_data.TextError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
