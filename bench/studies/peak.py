"""The most memory that a training process takes, and the time of a step, for each way to train.

    python -m mixprec.bench.studies.peak --model gpt --out bench/results/cpu/peak-gpt.json
    python -m mixprec.bench.studies.peak --model phi3 --out bench/results/cpu/peak-phi3.json

Each way of peak_step.py runs in fresh interpreters, one after the other, and its peak is the
maximum resident set size, imports included. Linux. With --caching-allocator each process calls
mixprec.memory.use_caching_allocator first, FP32's too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import pages, results
from ..cases.registry import example
from ..environment import environment
from ..table import duration, full, markdown
from . import peak_step

NAMES = {"phi3": "Phi-3 of transformers", "gpt": "GPT of examples/"}  # peak-MODEL.json
SIZES = {"layers": 4, "width": 512, "context": 256, "batch": 8}
VOCABULARY = {"gpt": 256, "phi3": 12000}
FIRST = "FP32"
# What docs/choose.md shows, and how it says so.
CHOSEN = {
    FIRST: "in FP32",
    "`torch.autocast`, bf16": "under `torch.autocast`",
    "checkpointing": "with checkpointing",
    "lean balanced": "with `mixprec.lean`",
    "checkpointing, lean balanced": "with both",
}


def add(row: dict[str, Any], way: str, settings: dict[str, Any]) -> None:
    """One more process of this way."""
    folder = str(Path(example("gpt_model").__file__).parent)
    paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    output = subprocess.check_output(
        [sys.executable, peak_step.__file__, way, json.dumps(settings)],
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    found = json.loads(output.splitlines()[-1])
    if "refused" in found:
        row["refused"] = found["refused"]
        return
    row["parameters"], row["losses"] = found["parameters"], found["losses"]
    # Where something is compiled, the first step does it.
    seconds = statistics.median(found["seconds"][1:] or found["seconds"])
    for name, value in (
        ("peaks", found["peak"]),
        ("baselines", found["baseline"]),
        ("seconds", seconds),
    ):
        row.setdefault(name, []).append(value)


# The tables


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
    return (
        f"{content['what']}, {rows[FIRST]['parameters'] / 1e6:.1f}M parameters:\n\n"
        f"{markdown(*full(header, body))}\n\nProcesses of {content['settings']['steps']} steps, "
        f"at least {min(map(len, peaks))} for each way, whose peaks differ by at most "
        f"{furthest:.0f} MB; medians. {pages.machine(where)}"
    )


def summary(contents: Iterable[dict[str, Any]]) -> str:
    """A sentence for docs/choose.md, with a list of peaks for each model."""
    lists = []
    for content in contents:
        found, what = measured(content), content["what"].partition(",")[0]
        millions = content["rows"][FIRST]["parameters"] / 1e6
        peaks = [f"{found[way]['peak'] / 1e6:,.0f}" for way in CHOSEN]
        if not lists:
            peaks = [" ".join(pair) for pair in zip(peaks, CHOSEN.values(), strict=True)]
        head, last = ", ".join(peaks[:-1]), peaks[-1]
        lists.append(f"{what} ({millions:.0f}M parameters): {head} and {last}")
    return (
        f"Memory: the peak of a training process on {content['environment']['processor']}, "
        f"imports included, in MB. {'. '.join(lists)}."
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=NAMES, default="gpt", help="phi3 needs transformers")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ways", nargs="*", help="these instead of all")
    parser.add_argument("--steps", type=int, default=6, help="of each process (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes a way (%(default)s)")
    parser.add_argument("--caching-allocator", action="store_true", help="in every process")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(%(default)s)")
    options = parser.parse_args(argv)
    settings = {
        name: getattr(options, name) for name in ("model", "steps", "caching_allocator", *SIZES)
    }
    settings["vocabulary"] = VOCABULARY[options.model]
    rows: dict[str, dict[str, Any]]
    rows = {way: {} for way in options.ways or peak_step.WAYS[options.model]}
    content = {
        "what": f"{NAMES[options.model]}, {options.layers} blocks of width {options.width}, "
        f"{options.batch * options.context:,} tokens a step"
        f"{', caching allocator' if options.caching_allocator else ''}",
        "environment": environment(quick=False),
        "settings": settings,
        "rows": rows,
    }
    for _ in range(options.repeats):  # the ways in turn, so that their times compare
        for way, row in rows.items():
            add(row, way, settings)
            what = row.get("refused") or f"{row['peaks'][-1] / 1e6:,.0f} MB"
            print(f"{way}: {what}", flush=True)
            results.write_json(options.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
