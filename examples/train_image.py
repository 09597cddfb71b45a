"""Train a small CNN or ViT to read glyphs or digits in several precisions, and compare them.

    python examples/train_image.py --model cnn|vit [--data digits] [--recipes fp32,fp8] ...

At the end: a table, DIR/results.json and DIR/image.png. The exit code is 0 if every precision has
a finite loss on the held-out images. `train` is one run; other programs call it too.
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
from image_models import MODELS
from torch import nn
from train_gpt import check_device, warmup_then_cosine

import mixprec
import mixprec.env

RECIPES = "fp32,bf16,fp16,fp8,fp8-delayed,fp8-rowwise,fp8-block"
BATCH = 32
STEPS = {"cnn": 400, "vit": 1200}
LR = {"cnn": 4e-3, "vit": 3e-3}
SHOWN = 24  # held-out images in the picture


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small CNN or ViT in several precisions and compare them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="cnn", help="what is trained")
    add("--data", choices=image_data.DATA, default="glyphs", help="on which images")
    add("--recipes", default=RECIPES, help="precisions, separated by commas")
    add("--steps", type=int, help=f"training steps of {BATCH} images (default: {STEPS})")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--device", default="cpu", help="cpu or cuda")
    add("--out", default="demo", metavar="DIR", help="where results.json and image.png go")
    options = parser.parse_args(argv)
    if options.steps is None:
        options.steps = STEPS[options.model]
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.recipes = list(dict.fromkeys(options.recipes.split(",")))
    for name in options.recipes:
        if name != "fp32":
            try:
                mixprec.Recipe.parse(name)
            except ValueError as error:
                parser.error(f"--recipes: {error} (or fp32)")
    return options


def make_model(
    name: str, recipe: str, images: image_data.Images, seed: int
) -> tuple[nn.Module, mixprec.GradScaler]:
    """The model as `recipe` wants it, with its loss scaler: a disabled one unless that is fp16."""
    torch.manual_seed(seed)
    model = MODELS[name](len(images.classes), images.side)
    scaled = False
    if recipe != "fp32":
        scaled = mixprec.Recipe.parse(recipe).needs_loss_scaling
        mixprec.convert(model, recipe)  # how the matrix products are computed
        # How the weights are stored: 16 bits, and FP32 masters in the optimizer.
        mixprec.cast_parameters(model, torch.float16 if scaled else torch.bfloat16)
    return model, mixprec.GradScaler(enabled=scaled)


def train(
    model_name: str,
    recipe: str,
    seed: int = 0,
    steps: int | None = None,
    data: str = "glyphs",
    device: str = "cpu",
    after_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
) -> dict[str, Any]:
    """Train one model and judge it on the held-out images; after_step(step, model, optimizer).

    Returns loss (mean cross-entropy, nats), accuracy (0 to 1), correct, samples; seconds of the
    training; skipped steps; losses, one a step; and predictions for the first held-out images.
    """
    steps = STEPS[model_name] if steps is None else steps
    images = image_data.load(data)
    model, scaler = make_model(model_name, recipe, images, seed)
    model.to(device)
    dtype = model.head.weight.dtype
    lr = LR[model_name]
    optimizer = mixprec.optim.AdamW(model.parameters(), lr, weight_decay=0.05, max_grad_norm=1.0)

    losses, start = [], time.perf_counter()
    for step, (x, labels) in enumerate(image_data.Batches(images.train, BATCH, steps, seed)):
        optimizer.param_groups[0]["lr"] = lr * warmup_then_cosine(step, steps)
        logits = model(x.to(device, dtype))
        loss = F.cross_entropy(logits.float(), labels.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if after_step is not None:
            after_step(step, model, optimizer)
        losses.append(loss.detach())  # reading it here would wait for the device at every step
    losses = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start

    result = evaluate(model, images.held_out)
    skipped = int(optimizer.skipped)
    return {"recipe": recipe, **result, "seconds": seconds, "skipped": skipped, "losses": losses}


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Loss and accuracy of the model, which is put in evaluation mode, on these images."""
    model.eval()
    images, labels = data
    weight = model.head.weight
    parts = [model(x.to(weight.device, weight.dtype)).float().cpu() for x in images.split(500)]
    logits = torch.cat(parts)
    predictions = logits.argmax(dim=1)
    correct = int((predictions == labels).sum())
    return {
        "loss": F.cross_entropy(logits, labels).item(),
        "accuracy": correct / len(labels),
        "correct": correct,
        "samples": len(labels),
        "predictions": predictions[:SHOWN].tolist(),
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One result of `train` per recipe, each printed as it comes; Ctrl-C ends it with fewer."""
    results: list[dict[str, Any]] = []
    head = ("recipe", "loss", "accuracy", "vs fp32", "seconds", "skipped")
    print(f"{head[0]:12} {head[1]:>8} {head[2]:>9} {head[3]:>13} {head[4]:>8} {head[5]:>8}")
    try:
        for recipe in options.recipes:
            words = (options.seed, options.steps, options.data, options.device)
            result = train(options.model, recipe, *words)
            results.append(result)
            print(line(result, results), flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows holds what there is", file=sys.stderr)
    return results


def line(result: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """A row of the table; the difference is in points, and counts once fp32 has been run."""
    base = next((r["accuracy"] for r in results if r["recipe"] == "fp32"), None)
    gap = "-"
    if base is not None and result["recipe"] != "fp32":
        gap = f"{100 * (result['accuracy'] - base):+.2f} points"
    return (
        f"{result['recipe']:12} {result['loss']:8.4f} {result['accuracy']:9.2%} {gap:>13} "
        f"{result['seconds']:8.1f} {result['skipped']:8}"
    )


def plot(results: list[dict[str, Any]], images: image_data.Images, path: Path) -> None:
    """Training losses, and held-out images with what the last recipe took them for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    above, below = figure.subfigures(2, 1)
    axes = above.subplots()
    for result in results:
        losses = torch.tensor(result["losses"])
        window = max(1, len(losses) // 25)
        means = losses.unfold(0, window, window).mean(dim=1)
        steps = range(window, window * len(means) + 1, window)
        axes.plot(steps, means.tolist(), label=result["recipe"])
    axes.set(xlabel="training step", ylabel=f"training loss (mean of {window} steps)")
    axes.set_title("Training loss by precision")
    axes.grid(alpha=0.3)
    axes.legend()

    below.suptitle(f"held-out images, as read in {results[-1]['recipe']} (wrong: red)")
    cells = below.subplots(3, SHOWN // 3).flat
    shown = zip(cells, *images.held_out, results[-1]["predictions"], strict=False)
    for cell, image, label, prediction in shown:
        cell.imshow(image[0].numpy(), cmap="gray")
        color = "black" if prediction == label else "red"
        cell.set_title(images.classes[prediction], color=color)
        cell.axis("off")
    figure.savefig(path)


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """results.json and, with matplotlib, image.png."""
    out = Path(options.out)
    content = {
        "options": vars(options),
        "environment": mixprec.env.versions() | mixprec.env.machine(),
        "results": results,
    }
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {out / 'results.json'}")
    try:
        plot(results, image_data.load(options.data), out / "image.png")
    except ImportError as error:
        print(f"no {out / 'image.png'}: {error}: pip install matplotlib", file=sys.stderr)
    else:
        print(f"wrote {out / 'image.png'}")


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    check_device(options.device)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)  # now, not after minutes of training
        images = image_data.load(options.data)
        print(
            f"{options.model} on {len(images.train[1]):,} {options.data}, {len(images.classes)} "
            f"classes; judged on {len(images.held_out[1]):,} others; {options.steps} steps of "
            f"{BATCH} on {options.device}, {torch.get_num_threads()} threads",
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
