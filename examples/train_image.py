"""Train an image classifier in several precisions and compare them.

    python examples/train_image.py --model cnn|vit [--recipes fp32,fp8] ...

At the end it prints a table and writes DIR/results.json and DIR/loss.png. The exit code is 0 if
every precision has a finite loss on the held-out images. `train` is one run; other programs call it
too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_data
import torch
import torch.nn.functional as F
from gpt_runs import LEAN, warmup_then_cosine
from image_models import MODELS
from plot_losses import plot_losses
from torch import nn
from train_gpt import check_device

import mixprec
import mixprec.env
from mixprec.lean_training import FIDELITIES

RECIPES = "fp32,bf16,fp16,fp8,fp8-delayed,fp8-rowwise,fp8-block"
STEPS = {"cnn": 400, "vit": 1200}
LR = {"cnn": 4e-3, "vit": 3e-3}
BATCH = 32


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an image classifier in several precisions and compare them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="cnn", help="the model to train")
    add("--recipes", default=RECIPES, help="precisions, separated by commas")
    add("--steps", type=int, help=f"training steps (default: {STEPS})")
    add("--batch", type=int, default=BATCH, help="images per step")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the data")
    add("--device", default="cpu", help="cpu or cuda")
    add("--out", default="demo", metavar="DIR", help="folder for results.json and loss.png")
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = STEPS[options.model]
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    options.recipes = options.recipes.split(",")
    for i, name in enumerate(options.recipes):
        if name != "fp32" and name.removeprefix(LEAN) not in FIDELITIES:
            try:
                options.recipes[i] = mixprec.Recipe.parse(name).name
            except ValueError as error:
                parser.error(f"--recipes: {error}; fp32 is a choice here too")
    options.recipes = list(dict.fromkeys(options.recipes))
    return options


def make_model(
    name: str, recipe: str, images: image_data.Images, seed: int
) -> tuple[nn.Module, mixprec.GradScaler]:
    """The model converted to `recipe`, and its loss scaler, which is enabled for fp16 only."""
    torch.manual_seed(seed)
    model = MODELS[name](len(images.classes), images.side)
    scaled = False
    if recipe != "fp32":
        scaled = mixprec.Recipe.parse(recipe).needs_loss_scaling
        mixprec.convert(model, recipe)  # how the matrix products are computed
        # How the weights are stored: in 16 bits, with FP32 masters in the optimizer.
        mixprec.cast_parameters(model, torch.float16 if scaled else torch.bfloat16)
    return model, mixprec.GradScaler(enabled=scaled)


def head(model: nn.Module) -> nn.Linear:
    """The last linear layer: its weight has the dtype of the images and is on their device."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def forward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Logits in FP32, from images in any dtype and on any device.

    torch.autocast, on a GPU and in 16 bits, is for norms: their weights are FP32, and torch's
    layer_norm on CUDA accepts no input of another dtype.
    """
    weight = head(model).weight
    mixed = weight.is_cuda and weight.dtype != torch.float32
    with torch.autocast(weight.device.type, weight.dtype if mixed else None, enabled=mixed):
        return model(images.to(weight.device, weight.dtype)).float()


def train(
    model_name: str,
    recipe: str,
    seed: int = 0,
    steps: int | None = None,
    device: str = "cpu",
    after_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    batch: int = BATCH,
) -> dict[str, Any]:
    """Train one model and evaluate it on the held-out images.

    after_step(step, model, optimizer) is called after each step. Returns loss (mean cross-entropy
    in nats), accuracy (0 to 1), correct and samples of the held-out images, and of the training
    seconds, images_per_second (without the first step), skipped (steps) and losses (one per step).
    """
    steps = STEPS[model_name] if steps is None else steps
    images = image_data.load()
    settings = {"lr": LR[model_name], "weight_decay": 0.05, "max_grad_norm": 1.0}
    lr = LR[model_name]
    if recipe.startswith(LEAN):
        model, scaler = make_model(model_name, "fp32", images, seed)
        fidelity = recipe.removeprefix(LEAN)
        model, optimizer = mixprec.lean(model, fidelity=fidelity, verbose=False, **settings)
        model.to(device)
    else:
        model, scaler = make_model(model_name, recipe, images, seed)
        model.to(device)
        optimizer = mixprec.optim.AdamW(model.parameters(), **settings)

    losses = []
    start = after_first = time.perf_counter()
    for step, (x, labels) in enumerate(image_data.Batches(images.train, batch, steps, seed)):
        optimizer.param_groups[0]["lr"] = lr * warmup_then_cosine(step, steps)
        loss = F.cross_entropy(forward(model, x), labels.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if after_step is not None:
            after_step(step, model, optimizer)
        losses.append(loss.detach())  # reading it here would wait for the device at every step
        if step == 0:
            loss.item()
            after_first = time.perf_counter()
    losses = torch.stack(losses).tolist()
    end = time.perf_counter()

    return {
        "recipe": recipe,
        **evaluate(model, images.held_out),
        "seconds": end - start,
        "images_per_second": batch * (steps - 1) / (end - after_first) if steps > 1 else None,
        "skipped": int(optimizer.skipped),
        "losses": losses,
    }


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Loss and accuracy on these images, in evaluation mode."""
    model.eval()
    images, labels = data
    logits = torch.cat([forward(model, x).cpu() for x in images.split(500)])
    correct = int((logits.argmax(dim=1) == labels).sum())
    return {
        "loss": F.cross_entropy(logits, labels).item(),
        "accuracy": correct / len(labels),
        "correct": correct,
        "samples": len(labels),
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One result of `train` per recipe, printed as soon as it is there; Ctrl-C returns fewer."""
    results: list[dict[str, Any]] = []
    print(
        f"{'recipe':12} {'loss':>8} {'accuracy':>9} {'vs fp32':>13} {'seconds':>8} "
        f"{'images/s':>9} {'skipped':>8}"
    )
    try:
        for recipe in options.recipes:
            result = train(
                options.model,
                recipe,
                seed=options.seed,
                steps=options.steps,
                device=options.device,
                batch=options.batch,
            )
            results.append(result)
            print(line(result, results), flush=True)
    except KeyboardInterrupt:
        print("interrupted: the files hold the results so far", file=sys.stderr)
    return results


def line(result: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """One line of the table; the difference is in points, and is known once fp32 has run."""
    baseline = next((r["accuracy"] for r in results if r["recipe"] == "fp32"), None)
    difference = speed = "-"
    if baseline is not None and result["recipe"] != "fp32":
        difference = f"{100 * (result['accuracy'] - baseline):+.2f} points"
    if result["images_per_second"] is not None:
        speed = f"{result['images_per_second']:,.0f}"
    return (
        f"{result['recipe']:12} {result['loss']:8.4f} {result['accuracy']:9.2%} {difference:>13} "
        f"{result['seconds']:8.1f} {speed:>9} {result['skipped']:8}"
    )


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write results.json and, with matplotlib, loss.png."""
    out = Path(options.out)
    content = {
        "options": vars(options),
        "environment": mixprec.env.versions() | mixprec.env.machine(),
        "results": results,
    }
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {out / 'results.json'}")
    curves, held_out = ({r["recipe"]: r[key] for r in results} for key in ("losses", "loss"))
    try:
        plot_losses(out / "loss.png", curves, held_out, "loss")
    except ImportError as error:
        print(f"no {out / 'loss.png'}: {error}", file=sys.stderr)
    else:
        print(f"wrote {out / 'loss.png'}")


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    check_device(options.device)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)  # fail before the training, not after
        images = image_data.load()
        print(
            f"{options.model} on {len(images.train[1]):,} glyphs, {len(images.classes)} "
            f"classes; {len(images.held_out[1]):,} held out; {options.steps} steps of "
            f"{options.batch} on {options.device}, {torch.get_num_threads()} threads",
            flush=True,
        )
        results = run(options)
        if results:
            write(options, results)
    except image_data.DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    bad = [r["recipe"] for r in results if not math.isfinite(r["loss"])]
    for recipe in bad:
        print(f"failed: {recipe} has no finite loss on the held-out images", file=sys.stderr)
    if len(results) < len(options.recipes):
        return 130
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
