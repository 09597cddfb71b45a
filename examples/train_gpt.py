"""Train one small GPT in FP32, BF16, FP16 and FP8 and compare: `make demo` runs this.

    python examples/train_gpt.py [--text FILE] [--full] [--device cuda] [--out DIR] ...

The text is the source code of the Python standard library, or a file of yours. At the end: a
table, DIR/results.json and DIR/loss.png. The exit code is 0 only if every layer of every block
ran all its matrix products in its recipe's format, each precision's validation loss is within 2 %
of FP32's, and each learned clearly more than the frequencies of single bytes.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpt_data
import torch
from gpt_model import GPT, GPTConfig
from gpt_progress import Progress
from torch import nn

import mixprec
import mixprec.env

BITS = 1 / math.log(2)  # a loss in nats, times this, is in bits
MAX_DIFFERENCE = 0.02  # to FP32's validation loss
GAIN, FULL_GAIN = 0.25, 0.33  # how far below the text's unigram entropy each run must come
STEPS, FULL_STEPS = 320, 1000
VALIDATION_BYTES = 32768
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one small GPT in several precisions and compare them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", metavar="FILE", help="train on this file (default: Python's standard library)")
    add("--full", action="store_true", help=f"{FULL_STEPS} steps instead of {STEPS}")
    add("--steps", type=int, help="training steps per precision (default: as --full says)")
    add("--recipes", default="fp32,bf16,fp16,fp8", help="precisions, separated by commas")
    add("--device", default="cpu", help="cpu or cuda")
    add("--out", default="demo", metavar="DIR", help="where results.json and loss.png go")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--batch", type=int, default=4, help="sequences per step")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--layers", type=int, default=3, help="transformer blocks")
    add("--width", type=int, default=256, help="size of the residual stream, a multiple of 64")
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = FULL_STEPS if options.full else STEPS
    for name in ("steps", "batch", "context", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.width % 64:
        parser.error(f"--width must be a multiple of 64, got {options.width}")
    options.recipes = options.recipes.split(",")
    for name in options.recipes:
        if name != "fp32":
            try:
                mixprec.recipes.Recipe.parse(name)
            except ValueError as error:
                parser.error(f"--recipes: {error} (or fp32)")
    return options


def check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        sys.exit(f"error: --device must be cpu or cuda, got {name}")
    if kind == "cuda" and not torch.cuda.is_available():
        reason = mixprec.env.machine()["gpu_reason"]
        sys.exit(f"error: --device {name}: there is no GPU to use ({reason})")


def warmup_then_cosine(step: int, steps: int) -> float:
    """The learning rate's factor: up over the first 20 steps, then down to 5 % on half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine)


def problems(
    report: mixprec.Report, block_linears: list[str], unigram: float, gain: float
) -> list[str]:
    """What a complete run should have reached and did not, one sentence each."""
    found = [f"{row.recipe} {row.status}" for row in report.rows if row.status != "complete"]
    found += report.wrong_gemms(block_linears)
    for row in report.rows:
        if row.validation_loss is None:
            continue
        bits = row.validation_loss * BITS
        difference = report.difference(row)
        if not math.isfinite(bits):
            found.append(f"{row.recipe} has no finite validation loss")
        elif difference is not None and abs(difference) > MAX_DIFFERENCE:
            found.append(
                f"{row.recipe} is {difference:+.2%} from fp32, more than {MAX_DIFFERENCE:.0%}"
            )
        if bits > unigram * (1 - gain):
            found.append(
                f"{row.recipe} reached {bits:.3f} bits per byte, which is not {gain:.0%} below "
                f"the {unigram:.3f} of single bytes"
            )
    return found


def commit() -> str | None:
    """The git commit of this checkout, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def compare(
    options: argparse.Namespace,
    text: gpt_data.Text,
    progress: Callable[[str, int, int | None, float], None] | None = None,
) -> mixprec.Report:
    """One GPT per precision of options.recipes, all from options.seed, on the same data."""
    config = gpt_config(options)
    evaluations = max(1, VALIDATION_BYTES // (options.batch * options.context))
    shape = options.batch, options.context

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return mixprec.optim.AdamW(params, options.lr, **ADAMW)

    return mixprec.compare(
        lambda: GPT(config),
        gpt_data.Batches(text.train, *shape, options.steps, options.seed),
        options.recipes,
        validation=gpt_data.Batches(text.validation, *shape, evaluations, None),
        make_optimizer=adamw,
        schedule=lambda step: warmup_then_cosine(step, options.steps),
        seed=options.seed,
        device=options.device,
        count=lambda batch: batch[0].numel(),
        unit="tokens",
        loss_name="bits/byte",
        loss_factor=BITS,
        progress=progress,
    )


def gpt_config(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(options.layers, options.width, options.width // 64, options.context)


def run(options: argparse.Namespace) -> int:
    text = gpt_data.load(options.text, options.context)
    unigram = text.unigram_entropy()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)  # now, not after minutes of training

    with torch.device("meta"):  # shapes and names only
        shapes = GPT(gpt_config(options))
    size = sum(p.numel() for p in shapes.parameters())
    block_linears = [
        name
        for name, module in shapes.named_modules()
        if name.startswith("blocks.") and isinstance(module, nn.Linear)
    ]
    tokens = options.batch * options.context
    print(
        f"GPT of {size / 1e6:.2f} million parameters on {text.train.numel() / 1e6:.2f} MB of text "
        f"({text.source}), unigram entropy {unigram:.3f} bits per byte\n"
        f"{options.steps} steps of {tokens} bytes per precision on {options.device}, "
        f"{torch.get_num_threads()} threads",
        flush=True,
    )
    with Progress(tokens, BITS) as progress:
        report = compare(options, text, progress.step)

    gain = FULL_GAIN if options.full else GAIN
    found = [] if report.interrupted else problems(report, block_linears, unigram, gain)
    report.options |= vars(options) | ADAMW | {"parameters": size}
    report.environment |= {
        **mixprec.env.versions(),
        **mixprec.env.machine(),
        "commit": commit(),
        "text": text.source,
        "text_bytes": {"train": text.train.numel(), "validation": text.validation.numel()},
        "unigram_bits_per_byte": unigram,
        "problems": found,
    }
    print(f"\n{report}\n", flush=True)
    for path, write in ((out / "results.json", report.save), (out / "loss.png", report.plot)):
        try:
            write(path)
        except OSError as error:
            print(f"error: cannot write {path}: {error.strerror or error}", file=sys.stderr)
            return 1
        except ImportError as error:  # no matplotlib: the numbers are there, the picture is not
            print(f"no {path}: {error}", file=sys.stderr)
        else:
            print(f"wrote {path}")
    if report.interrupted:
        print("interrupted: the table and the files hold what there is")
        return 130
    for problem in found:
        print(f"failed: {problem}", file=sys.stderr)
    if not found:
        best = max(report.rows, key=lambda row: row.validation_loss or 0.0)
        print(
            f"passed: every matrix product of every block ran in its recipe's format, each "
            f"precision is within {MAX_DIFFERENCE:.0%} of fp32 and at least "
            f"{1 - (best.validation_loss or 0.0) * BITS / unigram:.0%} below the unigram entropy"
        )
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
