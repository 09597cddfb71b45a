"""Measure what each precision costs in accuracy: GPT, CNN and ViT, over several seeds.

    python examples/accuracy.py --task gpt,cnn,vit --seeds 3 --out bench/results/cpu

Each task is trained once per recipe and seed. The seed determines the initial weights and the order
of the data, so each run is compared with the FP32 run of the same seed. OUT/accuracy-TASK.json (or
accuracy-TASK-SET.json with --set SET) is written after every run;
`python -m mixprec.bench report` generates docs/accuracy.md from them.
Needs the packages of `pip install "mixprec[examples]"`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpt_data
import train_gpt

import mixprec
from mixprec.bench.environment import environment

SETS = {
    "precisions": ("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block"),
    "fused": ("fp32", *(f"fused-{r}" for r in ("bf16", "fp16", "fp8", "fp8-delayed", "fp8-block"))),
    "formats": (
        *("fp32", "bf16", "fp8", "fp8@ada", "fp8@ada-fast", "fp8@hopper", "fp8@hopper-fast"),
        *("mxfp8", "nvfp4-1x16", "mxfp4"),
    ),
    "lean": ("fp32", "lean-high", "lean-balanced", "lean-small"),  # of mixprec.lean
}
DETAILED = "formats"  # the set whose runs have SQNRs, for the GPT only
CONFIDENCE = 0.95
# metric, whether more is better, unit of differences, largest loss accepted for FP8
GPT = ("bits/byte", False, "%", 0.5)
IMAGE = ("accuracy (%)", True, "points", 0.6)


def gpt_runs(
    recipes: Sequence[str], seed: int, steps: int | None, *, detailed: bool = False
) -> Iterator[dict[str, Any]]:
    """The GPT of the demo, on its text, with as many steps. detailed: with the signal to
    quantization noise ratios of its layers in dB, by layer and by what was measured."""
    for recipe in recipes:
        arguments = ["--recipes", recipe, "--seed", str(seed)]
        options = train_gpt.parse_arguments(arguments + (["--steps", str(steps)] if steps else []))
        text = gpt_data.load(None, options.context)
        run = train_gpt.compare(options, text, sqnr=detailed and recipe != "fp32").rows[0]
        loss = math.nan if run.validation_loss is None else run.validation_loss
        yield {
            "recipe": recipe,
            "value": loss * train_gpt.BITS,
            "loss": loss,
            "samples": train_gpt.VALIDATION_BYTES,
            "seconds": sum(run.seconds),
            "skipped": run.skipped_steps,
            "status": run.status,
            **({"sqnr": run.sqnr} if detailed else {}),
        }


def image_runs(
    model: str, recipes: Sequence[str], seed: int, steps: int | None
) -> Iterator[dict[str, Any]]:
    """A model of train_image.py on the glyphs."""
    import train_image

    for recipe in recipes:
        run = train_image.train(model, recipe, seed, steps)
        yield {
            "recipe": recipe,
            "value": 100 * run["accuracy"],
            **{key: run[key] for key in ("loss", "samples", "seconds", "skipped")},
            "status": "complete",
        }


TASKS: dict[str, tuple[tuple[str, bool, str, float], Callable[..., Iterator[dict[str, Any]]]]] = {
    "gpt": (GPT, gpt_runs),
    "cnn": (IMAGE, partial(image_runs, "cnn")),
    "vit": (IMAGE, partial(image_runs, "vit")),
}


def interval(values: list[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean, by Student's t; None for one."""
    from scipy import stats

    if len(values) < 2:
        return None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def summary(runs: list[dict[str, Any]], unit: str) -> list[dict[str, Any]]:
    """A dict per recipe: the mean, and the mean difference to the FP32 run of the same seed.

    Differences are in % of the FP32 value, or in points.
    """
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        values.setdefault(run["recipe"], {})[run["seed"]] = run["value"]
    base = values.get("fp32", {})
    lines = []
    for recipe, by_seed in values.items():
        line: dict[str, Any] = {"recipe": recipe, "seeds": len(by_seed)}
        line |= {
            "mean": statistics.fmean(by_seed.values()),
            "interval": interval([*by_seed.values()]),
        }
        paired = [seed for seed in by_seed if seed in base]
        if recipe != "fp32" and paired:
            factors = {s: 100 / base[s] if unit == "%" else 1.0 for s in paired}
            gaps = [(by_seed[s] - base[s]) * factors[s] for s in paired]
            line |= {"difference": statistics.fmean(gaps), "difference_interval": interval(gaps)}
        lines.append(line)
    return lines


def measure(
    task: str, which: str, seeds: int, steps: int | None, out: Path, *, resume: bool
) -> None:
    (metric, more_is_better, unit, limit), runs_of = TASKS[task]
    if which == DETAILED:
        runs_of = partial(gpt_runs, detailed=True)
    where = environment(quick=steps is not None)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"accuracy-{task}{'' if which == 'precisions' else f'-{which}'}.json"
    runs = json.loads(path.read_text())["runs"] if resume and path.exists() else []
    for seed in range(seeds):
        there = {run["recipe"] for run in runs if run["seed"] == seed}
        for run in runs_of([r for r in SETS[which] if r not in there], seed, steps):
            runs.append({"seed": seed, **run, "commit": where["commit"]})
            print(
                f"{task} seed {seed} {run['recipe']:13} {metric} {run['value']:.4f} "
                f"({run['seconds']:.0f} s, {run['skipped']} skipped, {run['status']})",
                flush=True,
            )
            content = {
                "task": task,
                "command": f"python examples/accuracy.py --task {task} --seeds {seeds}"
                + ("" if which == "precisions" else f" --set {which}")
                + (f" --steps {steps}" if steps else ""),
                "metric": metric,
                "more_is_better": more_is_better,
                "unit": unit,
                "limit": limit,
                "confidence": CONFIDENCE,
                "environment": where,
                "summary": summary(runs, unit),
                "runs": runs,
            }
            path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--task", default=",".join(TASKS), help="some of them, separated by commas: %(default)s")
    add("--set", choices=SETS, default="precisions", help="what is compared (%(default)s)")
    add("--seeds", type=int, default=3, help="runs per recipe (%(default)s)")
    add("--steps", type=int, help="training steps of each run, to try it out")
    add("--resume", action="store_true", help="keep the runs that the result file has")
    add("--out", type=Path, default=Path("bench/results/cpu"), help="folder of the results")
    options = parser.parse_args(argv)
    tasks = options.task.split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"--task must be among {', '.join(TASKS)}, got {', '.join(unknown)}")
    if options.set == DETAILED and tasks != ["gpt"]:
        parser.error(f"--set {DETAILED} needs --task gpt")
    if options.seeds < 1:
        parser.error(f"--seeds must be 1 or more, got {options.seeds}")
    print(
        f"mixprec {mixprec.__version__}, {', '.join(SETS[options.set])}, {options.seeds} seeds",
        flush=True,
    )
    for task in tasks:
        measure(task, options.set, options.seeds, options.steps, options.out, resume=options.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
