"""docs/accuracy.md: what each precision cost in accuracy, from the runs of examples/accuracy.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import pages, results
from .table import markdown

HEADER = ("recipe", "value", "against fp32", "verdict", "allowed", "skipped")
SIXTEEN = ("bf16", "fp16")  # they are to stay within the noise of FP32's own seeds


def load(folder: Path, task: str) -> dict[str, Any]:
    return results.read_json(folder / f"accuracy-{task}.json")


def worse(content: dict[str, Any], line: dict[str, Any]) -> float:
    """By how much the recipe is worse than FP32, in the task's unit; below 0 where it is better."""
    gap: float = line["difference"]
    return -gap if content["more_is_better"] else gap


def verdict(content: dict[str, Any], line: dict[str, Any]) -> str:
    """A difference smaller than its interval is none that was seen."""
    half = line["difference_interval"]
    if half is None:
        return "one seed: no verdict"
    if abs(line["difference"]) <= half:
        return "no difference seen"
    return "worse" if worse(content, line) > 0 else "better"


def allowed(content: dict[str, Any], line: dict[str, Any]) -> tuple[str, bool]:
    """The most that a recipe may be worse, and whether it is not.

    FP8: the task's limit. 16 bits: the noise of FP32, the interval of the mean over its seeds.
    """
    base = next(entry for entry in content["summary"] if entry["recipe"] == "fp32")
    limit: float = content["limit"]
    if line["recipe"].removeprefix("fused-") in SIXTEEN and base["interval"] is not None:
        limit = base["interval"] * (100 / base["mean"] if content["unit"] == "%" else 1.0)
    met = worse(content, line) <= limit
    return f"{limit:.2f}{_unit(content)}: {'yes' if met else 'no'}", met


def _unit(content: dict[str, Any]) -> str:
    return "%" if content["unit"] == "%" else f" {content['unit']}"


def _signed(content: dict[str, Any], line: dict[str, Any]) -> str:
    width = line["difference_interval"]
    half = "" if width is None else f" ± {width:.2f}"
    return f"{line['difference']:+.2f}{half}{_unit(content)}"


def sentence(content: dict[str, Any], recipes: list[str]) -> str:
    """How far these recipes are from FP32 over all seeds, for a page beside docs/."""
    found = [
        f"{line['recipe']} {_signed(content, line)} ({verdict(content, line)})"
        for line in content["summary"]
        if line["recipe"] in recipes and "difference" in line
    ]
    seeds = content["summary"][0]["seeds"]
    return (
        f"Those are single runs. The mean over {seeds} seeds against FP32, with its 95 % interval "
        f"([accuracy](docs/accuracy.md)): {'; '.join(found)}."
    )


def task_block(content: dict[str, Any]) -> str:
    body = []
    for line in content["summary"]:
        runs = [run for run in content["runs"] if run["recipe"] == line["recipe"]]
        half = "" if line["interval"] is None else f" ± {line['interval']:.3f}"
        skipped = sum(run["skipped"] or 0 for run in runs)
        against = ("", "", "")
        if "difference" in line:
            met = allowed(content, line)[0]
            against = (_signed(content, line), verdict(content, line), met)
        body.append((line["recipe"], f"{line['mean']:.3f}{half}", *against, str(skipped)))
    seeds = content["summary"][0]["seeds"]
    samples = content["runs"][0]["samples"]
    of = "bytes of text" if content["task"] == "gpt" else "images"
    header = (HEADER[0], content["metric"], *HEADER[2:])
    return (
        f"{markdown(header, body)}\n\n{seeds} seeds, {samples:,} held-out {of}. "
        f"`{content['command']}`. {pages.machine(content['environment'])}"
    )
