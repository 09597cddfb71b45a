"""What each precision costs in accuracy: GPT, CNN and ViT of examples/, over several seeds.

    python -m mixprec.bench.studies.accuracy --task gpt,cnn,vit --seeds 3

Each task is trained once per recipe and seed. The seed determines the initial weights and the order
of the data, so each run is compared with the FP32 run of the same seed. OUT/accuracy-TASK.json (or
accuracy-TASK-SET.json with --set SET) is written after every run, and
`python -m mixprec.bench report` makes the tables of docs/accuracy.md and formats.md from them.
Needs the packages of `pip install "mixprec[examples]"`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import pages, results
from ..cases.registry import example
from ..environment import environment
from ..table import markdown

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
PRODUCTS = ("y", "grad_input", "grad_weight")
CONFIDENCE = 0.95
# unit: of differences; limit: the largest loss accepted for FP8
GPT = {"metric": "bits/byte", "more_is_better": False, "unit": "%", "limit": 0.5}
IMAGE = {"metric": "accuracy (%)", "more_is_better": True, "unit": "points", "limit": 0.6}
SIXTEEN = ("bf16", "fp16")  # they are to stay within the noise of FP32's own seeds
Runs = Iterator[dict[str, Any]]


def gpt_runs(recipes: Sequence[str], seed: int, steps: int | None, *, sqnr: bool = False) -> Runs:
    """The GPT of the demo, on its text, with as many steps. sqnr: with the signal to quantization
    noise ratios of its layers in dB, by layer and product."""
    train_gpt, gpt_runs, gpt_data = map(example, ("train_gpt", "gpt_runs", "gpt_data"))
    for recipe in recipes:
        arguments = ["--recipes", recipe, "--seed", str(seed)]
        options = train_gpt.parse_arguments(arguments + (["--steps", str(steps)] if steps else []))
        text = gpt_data.load(None, options.context)
        run = gpt_runs.compare(options, text, sqnr=sqnr and recipe != "fp32").rows[0]
        loss = math.nan if run.validation_loss is None else run.validation_loss
        yield {
            "recipe": recipe,
            "value": loss * gpt_runs.BITS,
            "loss": loss,
            "samples": gpt_runs.VALIDATION_BYTES,
            "seconds": sum(run.seconds),
            "skipped": run.skipped_steps,
            "status": run.status,
            **({"sqnr": run.sqnr} if sqnr else {}),
        }


def image_runs(model: str, recipes: Sequence[str], seed: int, steps: int | None) -> Runs:
    """A model of train_image.py on the glyphs."""
    for recipe in recipes:
        run = example("train_image").train(model, recipe, seed, steps)
        kept = {key: run[key] for key in ("loss", "samples", "seconds", "skipped")}
        yield {"recipe": recipe, "value": 100 * run["accuracy"], **kept, "status": "complete"}


TASKS: dict[str, tuple[dict[str, Any], Callable[..., Runs]]] = {
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
        every = [*by_seed.values()]
        line: dict[str, Any] = {"recipe": recipe, "seeds": len(every)}
        line |= {"mean": statistics.fmean(every), "interval": interval(every)}
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
    about, runs_of = TASKS[task]
    if which == DETAILED:
        runs_of = partial(gpt_runs, sqnr=True)
    where = environment(quick=steps is not None)
    path = out / f"accuracy-{task}{'' if which == 'precisions' else f'-{which}'}.json"
    runs = results.read_json(path)["runs"] if resume and path.exists() else []
    for seed in range(seeds):
        there = {run["recipe"] for run in runs if run["seed"] == seed}
        for run in runs_of([r for r in SETS[which] if r not in there], seed, steps):
            runs.append({"seed": seed, **run, "commit": where["commit"]})
            print(
                f"{task} seed {seed} {run['recipe']:13} {about['metric']} {run['value']:.4f} "
                f"({run['seconds']:.0f} s, {run['skipped']} skipped, {run['status']})",
                flush=True,
            )
            content = {
                "task": task,
                "set": which,
                **about,
                "confidence": CONFIDENCE,
                "environment": where,
                "summary": summary(runs, about["unit"]),
                "runs": runs,
            }
            results.write_json(path, content)


# The tables


def verdict(content: dict[str, Any], line: dict[str, Any]) -> str:
    """A difference smaller than its interval is not significant."""
    half = line["difference_interval"]
    if half is None:
        return "one seed: no verdict"
    if abs(line["difference"]) <= half:
        return "not significant"
    return "better" if (line["difference"] > 0) == content["more_is_better"] else "worse"


def allowed(content: dict[str, Any], line: dict[str, Any]) -> tuple[str, bool]:
    """The most that a recipe may be worse, and whether it is not.

    FP8: the task's limit. 16 bits: the noise of FP32, the interval of the mean over its seeds.
    """
    base = next(entry for entry in content["summary"] if entry["recipe"] == "fp32")
    limit: float = content["limit"]
    if line["recipe"].removeprefix("fused-") in SIXTEEN and base["interval"] is not None:
        limit = base["interval"] * (100 / base["mean"] if content["unit"] == "%" else 1.0)
    met = (-line["difference"] if content["more_is_better"] else line["difference"]) <= limit
    return f"{limit:.2f}{_unit(content)}: {'yes' if met else 'no'}", met


def _unit(content: dict[str, Any]) -> str:
    return "%" if content["unit"] == "%" else f" {content['unit']}"


def _half(width: float | None, digits: int) -> str:
    return "" if width is None else f" ± {width:.{digits}f}"


def _signed(content: dict[str, Any], line: dict[str, Any]) -> str:
    half = _half(line["difference_interval"], 2)
    return f"{line['difference']:+.2f}{half}{_unit(content)}"


def sentence(content: dict[str, Any], recipes: list[str]) -> str:
    """How far these recipes are from FP32 over all seeds, for a page beside docs/."""
    found = [
        f"{line['recipe']} {_signed(content, line)} ({verdict(content, line)})"
        for line in content["summary"]
        if line["recipe"] in recipes and "difference" in line
    ]
    return (
        f"Those are single runs. The mean over {content['summary'][0]['seeds']} seeds against "
        f"FP32, with its 95 % interval: {'; '.join(found)}."
    )


def _sqnr(runs: list[dict[str, Any]], product: str) -> str:
    """The median over the layers and seeds."""
    layers = [layer for run in runs for layer in run["sqnr"].values()]
    found = [layer[product] for layer in layers if layer.get(product) is not None]
    return f"{statistics.median(found):.0f} dB" if found else ""


def block(content: dict[str, Any]) -> str:
    """The table of one task."""
    products = PRODUCTS if "sqnr" in content["runs"][0] else ()
    body = []
    for line in content["summary"]:
        runs = [run for run in content["runs"] if run["recipe"] == line["recipe"]]
        mean = f"{line['mean']:.3f}{_half(line['interval'], 3)}"
        against = ("", "", "")
        if "difference" in line:
            against = _signed(content, line), verdict(content, line), allowed(content, line)[0]
        skipped = str(sum(run["skipped"] or 0 for run in runs))
        sqnrs = (_sqnr(runs, product) for product in products)
        body.append((line["recipe"], mean, *against, skipped, *sqnrs))
    of = "bytes of text" if content["task"] == "gpt" else "images"
    header = ("recipe", content["metric"], "against fp32", "verdict", "allowed", "skipped")
    header += tuple(f"SQNR of {product}" for product in products)
    return (
        f"{markdown(header, body)}\n\n{content['summary'][0]['seeds']} seeds, "
        f"{content['runs'][0]['samples']:,} held-out {of}. {pages.machine(content['environment'])}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--task", default=",".join(TASKS), help="some of them, separated by commas: %(default)s")
    add("--set", choices=SETS, default="precisions", help="what is compared (%(default)s)")
    add("--seeds", type=int, default=3, help="runs per recipe (%(default)s)")
    add("--steps", type=int, help="training steps of each run, to try it out")
    add("--resume", action="store_true", help="keep the runs that the result file has")
    add("--out", type=Path, default=results.CPU, help="folder of the results (%(default)s)")
    options = parser.parse_args(argv)
    tasks = options.task.split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"--task must be among {', '.join(TASKS)}, got {', '.join(unknown)}")
    if options.set == DETAILED and tasks != ["gpt"]:
        parser.error(f"--set {DETAILED} needs --task gpt")
    if options.seeds < 1:
        parser.error(f"--seeds must be 1 or more, got {options.seeds}")
    for task in tasks:
        measure(task, options.set, options.seeds, options.steps, options.out, resume=options.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
