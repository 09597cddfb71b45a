"""The peak of a training process, as examples/peak_memory.py measured it, for docs/ and README."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import pages, results
from .table import duration, full, markdown

MODELS = ("phi3", "gpt")  # peak-MODEL.json
FIRST = "FP32"
# What README.md shows, and how it says so.
CHOSEN = {
    FIRST: "in FP32",
    "`torch.autocast`, bf16": "under `torch.autocast`",
    "checkpointing": "with checkpointing",
    "lean balanced": "with `mixprec.lean`",
    "checkpointing, lean balanced": "with both",
}


def load(cpu: Path, model: str) -> dict[str, Any]:
    return results.read_json(cpu / f"peak-{model}.json")


def measured(content: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The medians of each way that ran, in bytes and seconds."""
    found = {}
    for way, row in content["rows"].items():
        if "refused" not in row:
            peak, baseline = (statistics.median(row[key]) for key in ("peaks", "baselines"))
            above, seconds = peak - baseline, statistics.median(row["seconds"])
            found[way] = {"peak": peak, "above": above, "seconds": seconds}
    return found


def block(content: dict[str, Any]) -> str:
    """The table of docs/memory.md: each way, its peak, and what of it is above the imports; times
    where no other program ran."""
    found, rows, where = measured(content), content["rows"], content["environment"]
    first, idle = found[FIRST], (where["load"] or 0) <= where["threads"]
    body = []
    for way, row in rows.items():
        if way not in found:
            body.append((way, row["refused"], *("",) * 6))
            continue
        one = found[way]
        cells = [f"{one['peak'] / 1e6:,.0f} MB", f"{one['above'] / 1e6:,.0f} MB"]
        cells += [duration(one["seconds"])]
        shares = [f"{one[key] / first[key]:.2f}" for key in ("peak", "above", "seconds")]
        pairs = [cell for pair in zip(cells, shares, strict=True) for cell in pair]
        losses = f"{row['losses'][0]:.2f}, {row['losses'][-1]:.2f}"
        body.append((way, *(pairs if idle else [*pairs[:4], "", ""]), losses))
    header = ("", "peak", "of FP32", "above the imports", "of FP32", "a step", "of FP32", "loss")
    peaks = [row["peaks"] for row in rows.values() if "refused" not in row]
    furthest = max(max(some) - min(some) for some in peaks) / 1e6
    processes, steps = min(map(len, peaks)), content["settings"]["steps"]
    return (
        f"{content['what']}, {rows[FIRST]['parameters'] / 1e6:.1f}M parameters:\n\n"
        f"{markdown(*full(header, body))}\n\nProcesses of {steps} steps, at least {processes} for "
        f"each way, whose peaks differ by at most {furthest:.0f} MB; medians. "
        f"{pages.machine(where)}"
    )


def summary(contents: Iterable[dict[str, Any]]) -> str:
    """A sentence for README.md, with a list of peaks for each model."""
    lists = []
    for content in contents:
        found, what = measured(content), content["what"].partition(",")[0]
        millions = content["rows"][FIRST]["parameters"] / 1e6
        peaks = [f"{found[way]['peak'] / 1e6:,.0f}" for way in CHOSEN]
        named = [f"{peak} {name}" for peak, name in zip(peaks, CHOSEN.values(), strict=True)]
        listed = named if not lists else peaks
        lists.append(
            f"{what} ({millions:.0f}M parameters): {', '.join(listed[:-1])} and {listed[-1]}"
        )
    where = content["environment"]
    return (
        f"Memory: the peak of a training process on {where['processor']}, imports included, in MB. "
        f"{'. '.join(lists)}."
    )
